"""Tools that inspect a model: their output files, compared with the model."""

import csv
import importlib.util
import runpy
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import mmpretrain
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from packaging.specifiers import SpecifierSet
from PIL import Image

from aft_mm.analysis import AtMost, plot_receptive_field
from aft_mm.analysis.networks import (
    build_dataset,
    class_names,
    load_images,
    load_network,
    network_inputs,
    shown_image,
    spread_samples,
)
from aft_mm.analysis.plot_keys import key_maps
from aft_mm.analysis.plot_position_bias import position_bias_table

from ..errors import stops
from ..helpers import ROOT, command

NEEDS_GRAD_CAM = pytest.mark.skipif(
    not importlib.util.find_spec('pytorch_grad_cam'), reason='needs the extra "analysis"'
)
OF_VIS_CAM = '<1.5'  # vis_cam.py passes use_cuda, which later versions refuse
VIS_CAM = Path(mmpretrain.__file__).parent / '.mim/tools/visualization/vis_cam.py'


@pytest.fixture
def analysis(tool, monkeypatch):
    def call(name, *words):
        command(name)(words)
        return tool(name)

    return call


def rows_of(path):
    with open(path, newline='') as file:
        return list(csv.DictReader(file))


def colourful(path):
    return np.asarray(Image.open(path).convert('RGB')).std() > 5


def test_the_table_of_position_biases(analysis, digits_classifier, tmp_path, capsys):
    words = f'--out {tmp_path}/a.png --csv {tmp_path}/a.csv --layers 1 --heads first:3 --dpi 40'
    analysis('plot bias', *digits_classifier, *words.split())
    bias = load_network(*digits_classifier).backbone.layers[1].token_mixer.position_bias()
    expected = position_bias_table({'layer 1': bias})
    found = rows_of(tmp_path / 'a.csv')
    assert [row['head'] for row in found] == ['0', '1', '2', '3']
    for row, numbers in zip(found, expected, strict=True):
        assert float(row['entropy_bits']) == pytest.approx(numbers['entropy_bits'], rel=1e-5)
    red, _, blue, _ = np.moveaxis(np.asarray(Image.open(tmp_path / 'a.png'), int), 2, 0)
    assert (red > blue + 76).mean() > 0.01 and (blue > red + 76).mean() > 0.01
    assert 'plotted 1 of 2 layers' in capsys.readouterr().out


def test_keys_are_those_of_the_mixer(analysis, digits_classifier, tmp_path):
    words = f'--out {tmp_path}/k.png --num 2 --dpi 40'.split()
    module = analysis('plot keys', *digits_classifier, *words)
    assert colourful(tmp_path / 'k-1.png') and colourful(tmp_path / 'k-2.png')

    network = load_network(*digits_classifier)
    layer = network.backbone.layers[0]
    inputs = network_inputs(network.model, [build_dataset(network.config)[5]])
    found = module.keys_of(network, {'layer 0': layer.token_mixer}, inputs)['layer 0']
    key = layer.token_mixer.key(layer.norm1(network.backbone._embed(inputs)[0]))[0].double()
    expected = key.exp() / key.exp().mean(0)
    torch.testing.assert_close(found, expected.T.view(4, 4, 4))
    torch.testing.assert_close(key_maps(key + 30 * torch.randn(4).double(), (4, 4)), found)


@NEEDS_GRAD_CAM
def test_class_activation_maps_are_the_formula(tool, analysis, digits_classifier, tmp_path):
    """After the last norm and the mean over tokens, only the weights of the head remain."""
    analysis('plot cam', *digits_classifier, '--out', tmp_path / 'c.png', '--num', 2, '--dpi', 40)
    assert colourful(tmp_path / 'c.png')

    module, network = tool('plot cam'), load_network(*digits_classifier)
    name = module.target_layer(network)
    inputs = network_inputs(network.model, [build_dataset(network.config)[i] for i in (0, 9)])
    # For other classes the whole map may be negative.
    categories = network.model(inputs).argmax(1).tolist()
    found = module.activation_maps(network, network.backbone.norm, inputs, categories)
    assert name == 'norm' and found.shape == (2, 8, 8)
    with torch.no_grad():
        x, grid = network.backbone._embed(inputs)
        for layer in network.backbone.layers:
            x = layer(x, grid)
        for image, category in enumerate(categories):
            weight = network.model.head.fc.weight[category]
            expected = (network.backbone.norm(x[image]) @ weight).relu().view(4, 4)
            # The library enlarges bilinearly from 4 to 8 pixels, then scales to 0 … 1.
            enlarged = torch.nn.functional.interpolate(
                expected[None, None], size=8, mode='bilinear'
            )[0, 0]
            low, high = enlarged.min(), enlarged.max()
            np.testing.assert_allclose(found[image], (enlarged - low) / (high - low), atol=1e-4)


@NEEDS_GRAD_CAM
def test_the_scores_of_several_labels_are_sigmoids(
    analysis, digits_classifier, multi_label, tmp_path, monkeypatch
):
    titles = []
    monkeypatch.setattr(
        'aft_mm.analysis.plot_cam.draw_cams', lambda *args: titles.append(args[2]) or Mock()
    )
    files = multi_label(*digits_classifier)
    analysis('plot cam', *files, '--out', tmp_path / 'c.png', '--num', 1, '--category', 4)
    network = load_network(*digits_classifier)
    logits = network.model(network_inputs(network.model, [build_dataset(network.config)[0]]))
    assert titles == [[f'4, p = {float(logits[0, 4].sigmoid()):.2f}']]


@NEEDS_GRAD_CAM
@pytest.mark.skipif(not VIS_CAM.is_file(), reason='mmpretrain came without its tools')
@pytest.mark.parametrize('with_cls_token', [False, True])
def test_vis_cam_of_mmpretrain_works_unchanged(with_cls_token, tmp_path, monkeypatch, capsys):
    if version('grad-cam') not in SpecifierSet(OF_VIS_CAM):
        pytest.skip(f'vis_cam.py needs grad-cam{OF_VIS_CAM}, which the lock has')
    config = Config.fromfile(ROOT / 'tests/configs/tiny_images.py', import_custom_modules=False)
    config.custom_imports.imports = ['aft_mm.registry']
    config.model.backbone.out_type = 'cls_token' if with_cls_token else 'avg_featmap'
    if with_cls_token:
        config.model.backbone.with_cls_token = True
        config.model.backbone.token_mixer = dict(type='aft_mm.AFTFull', rank=4)
    config.test_dataloader.dataset.pipeline = config.train_dataloader.dataset.pipeline
    config.dump(tmp_path / 'images.py')
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        model = MODELS.build(config.model)
    torch.save(dict(state_dict=model.state_dict(), meta={}), tmp_path / 'images.pth')
    pixels = np.random.default_rng(0).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / 'a.png')
    words = f'vis_cam.py {tmp_path}/a.png {tmp_path}/images.py {tmp_path}/images.pth'.split()
    words += ['--vit-like', '--save-path', str(tmp_path / 'cam.png')]
    monkeypatch.setattr(sys, 'argv', words)
    with DefaultScope.overwrite_default_scope('mmpretrain'):  # other tests may have set another one
        runpy.run_path(str(VIS_CAM), run_name='__main__')
    layer = 'backbone.layers.1.norm1' if with_cls_token else 'backbone.norm'
    assert f'"{layer}"' in capsys.readouterr().out
    assert Image.open(tmp_path / 'cam.png').size == (8, 8)


def test_confusions_accuracy_and_mistakes(analysis, digits_classifier, tmp_path, capsys):
    words = f'--out {tmp_path}/m.png --csv {tmp_path}/m.csv --mistakes {tmp_path}/w.png --num 4'
    words = [*words.split(), '--batch-size', 13, '--dpi', 40]
    module = analysis('plot confusion', *digits_classifier, *words)
    network = load_network(*digits_classifier)
    dataset = build_dataset(network.config)
    samples = [dataset[i] for i in range(len(dataset))]
    with torch.no_grad():
        predicted = network.model(network_inputs(network.model, samples)).argmax(1).tolist()
    labels = [int(sample['data_samples'].gt_label) for sample in samples]
    rows = rows_of(tmp_path / 'm.csv')
    assert len(rows) == 10 and sum(int(row['images']) for row in rows) == len(labels) == 65
    for number, row in enumerate(rows):
        mine = [p == number for p, label in zip(predicted, labels, strict=True) if label == number]
        assert float(row['accuracy']) == pytest.approx(np.mean(mine), rel=1e-5)
    right = np.mean(np.equal(predicted, labels))
    shown = capsys.readouterr().out
    assert f'65 images, accuracy {100 * right:.2f} %, written to ' in shown
    assert shown.endswith(f'{tmp_path}/m.png, {tmp_path}/m.csv, {tmp_path}/w.png\n')
    assert colourful(tmp_path / 'w.png') and colourful(tmp_path / 'm.png')

    probabilities = np.array([[0.6, 0.4, 0], [0.1, 0.9, 0], [0.3, 0, 0.7], [0.2, 0.8, 0]])
    wrong = module.most_confident_mistakes(probabilities, np.array([1, 1, 0, 2]), 2)
    assert wrong.tolist() == [3, 2]
    figure = module.draw_confusion(np.array([[3, 1], [0, 4]]), ['a', 'b'])
    np.testing.assert_allclose(figure.axes[0].images[0].get_array(), [[0.75, 0.25], [0, 1]])
    assert figure.get_suptitle() == '8 images, accuracy 87.5 %'


def test_features_and_their_neighbours(analysis, digits_classifier, tmp_path):
    words = f'--out {tmp_path}/f.png --num 40 --dpi 40'.split()
    module = analysis('plot features', *digits_classifier, *words)
    assert colourful(tmp_path / 'f.png')
    features = torch.tensor([[0.0, 0], [1, 0], [1.5, 0], [9, 9], [9, 8]])
    # The nearest of each: 1, 2, 1, 4, 3.
    assert module.neighbour_share(features, np.array([0, 0, 1, 1, 1])) == pytest.approx(3 / 5)
    figure = module.draw_features(features.numpy(), np.array([0, 0, 1, 1, 1]), ['a', 'b'])
    first, second = figure.axes[0].collections
    np.testing.assert_array_equal(second.get_offsets(), features[2:])
    assert (first.get_facecolor() != second.get_facecolor()).any()


@pytest.mark.parametrize(
    'words, layers',
    [
        ('{config} {checkpoint} --num 2 --layers 0', ['layers.0']),
        ('timm:resnet18 --size 32 --num 1 --layers layer1,layer2.0', ['layer1', 'layer2.0']),
        ('convnext-tiny_32xb128_in1k --noise --size 32 --num 1 --layers first:1', ['stages.0']),
    ],
)
def test_fields_of_networks_of_three_libraries(
    words, layers, analysis, digits_classifier, tmp_path
):
    config, checkpoint = digits_classifier
    words = words.format(config=config, checkpoint=checkpoint).split()
    words += f'--out {tmp_path}/f.png --csv {tmp_path}/f.csv --radius 5 100 --dpi 40'.split()
    analysis('plot receptive-field', *words)
    rows = rows_of(tmp_path / 'f.csv')
    assert [row['layer'] for row in rows] == layers and colourful(tmp_path / 'f.png')
    for row in rows:
        assert 0 < float(row['within_5_px']) <= float(row['within_100_px']) == 1
        assert 0 < float(row['half_px']) <= float(row['most_px'])


def test_a_field_belongs_to_its_place(tmp_path, monkeypatch):
    fields, draw = [], plot_receptive_field.draw_receptive_field
    monkeypatch.setattr(
        plot_receptive_field,
        'draw_receptive_field',
        lambda *args: fields.append(args[0]) or draw(*args),
    )
    words = 'timm:resnet18 --size 64 --num 1 --layers layer1 --dpi 20 --place'
    for place in ('0 15', '15 0'):  # of 16 × 16
        given = [*words.split(), *place.split(), '--out', tmp_path / 'f.png']
        command('plot receptive-field')(given)
    above, below = (field['layer1'] for field in fields)
    assert above[:32, 32:].sum() > 0.9 * above.sum()
    assert below[32:, :32].sum() > 0.9 * below.sum()


def test_files_go_through_the_pipeline_of_the_config(tmp_path):
    """mmcv reads BGR; pictures are RGB."""
    path = str(
        ROOT / 'configs/image_classification/aft-conv-mini-h96-k7_1xb50-40e_imagenette-64px.py'
    )
    config = Config.fromfile(path)
    pixels = np.zeros((73, 90, 3), np.uint8)
    pixels[..., 0] = 200
    Image.fromarray(pixels).save(tmp_path / 'red.png')
    (sample,) = load_images(config, [tmp_path / 'red.png'])
    assert sample['inputs'].shape == (3, 64, 64) and (sample['inputs'][2] == 200).all()
    np.testing.assert_array_equal(shown_image(config, sample), pixels[:64, :64])
    red = network_inputs(load_network(path).model, [sample])[0, :, 5, 5]
    np.testing.assert_allclose(
        red,
        ([200, 0, 0] - np.array([123.675, 116.28, 103.53])) / [58.395, 57.12, 57.375],
        rtol=1e-5,
    )
    config.data_preprocessor.to_rgb = False  # mmcv still reads BGR
    (sample,) = load_images(config, [tmp_path / 'red.png'])
    assert (sample['inputs'][2] == 200).all()
    np.testing.assert_array_equal(shown_image(config, sample), pixels[:64, :64])
    assert class_names(None, 3) == ['0', '1', '2']
    model = SimpleNamespace(dataset_meta=dict(classes=('church', 'fish')))
    assert class_names(None, 2, model) == ['church', 'fish']
    # A default number is at most that of the samples.
    assert spread_samples(range(5), AtMost(300)) == list(range(5))


@pytest.mark.parametrize(
    'name, words, message',
    [
        ('plot bias', '{} --layers 2', "--layers must be 'all', .* got '2'"),
        ('plot bias', '{} --heads 4', 'heads must be .* 0 to 3'),
        ('plot keys', '{} no.jpg', "image 'no.jpg' cannot be read"),
        ('plot keys', '{} --num 99', '--num must be at most 65, the samples'),
        (
            'plot keys',
            '{config} {other}',
            '^Error: the checkpoint does not fit AFTViT with 2 layers',
        ),
        ('plot attention', '{} --num 1', 'no layer that calls torch'),
        ('plot attention', 'timm:no a.pth', 'checkpoint .a.pth. does not exist'),
        ('plot receptive-field', 'timm:no', "timm has no model 'no'"),
        ('plot receptive-field', '{} --noise --size 0', '--size must be an int, 1 or larger'),
        ('plot cam', '{} --layer patch_embed', '--layer must return one tensor, got tuple'),
        ('plot receptive-field', '{} --layers norm9', "AFTViT has no layer 'norm9'"),
        ('plot cam', '{} --category 10', '--category must be 0 to 9, got 10'),
        ('plot confusion', '{} --mistakes a.txt', '--mistakes must end in'),
    ],
)
def test_bad_input_gives_a_one_line_message(
    name, words, message, analysis, digits_classifier, untrained, here
):
    other = untrained['tiny_text'][1]
    words = words.format(' '.join(digits_classifier), config=digits_classifier[0], other=other)
    stops(message, analysis, name, *words.split(), '--out', 'a.png')
    assert not (here / 'a.png').exists()
