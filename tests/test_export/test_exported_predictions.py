"""Exported files say how to feed them, and predict what the checkpoint does, on real pictures."""

import functools
import json
import shutil

import numpy as np
import pytest
import torch
from mmengine.config import Config
from torch import nn

from aft_mm.apis import ImageClassifier, load_model
from aft_mm.apis.loading import build_model
from aft_mm.export.files import FORMATS

from ..errors import stops
from ..helpers import ROOT, command, load_script, picture

onnx = pytest.importorskip('onnxscript', reason='onnxscript writes the graphs')
pytest.importorskip('onnxruntime', reason='onnxruntime runs the graphs')
export, predict = command('export'), command('predict')
SUFFIXES = [
    '.pt2',
    '.onnx',
    pytest.param('.xml', marks=pytest.mark.slow),
]
CLASSES = {
    'classes': 'tench,English springer,cassette player,chain saw,church,Φ,truck,pump,"ball",<&>',
    'boxes': 'RBC,WBC,Platelets',
    'masks': 'sky,building,pole,road,pavement,tree,sign,fence,car,pedestrian,bicyclist',
}
CONFIGS = {
    'classes': ROOT
    / 'configs/image_classification/aft-conv-mini-h96-k7_1xb50-40e_imagenette-64px.py',
    'boxes': ROOT / 'tests/configs/tiny_detection.py',
    'masks': ROOT / 'tests/configs/tiny_segmentation.py',
}
PICTURES = {'classes': 'imagenette/val/*/*', 'boxes': 'bccd/JPEGImages/*', 'masks': 'camvid/test/*'}
WORDS = {'classes': [], 'boxes': [], 'masks': ['--size', 360, 480]}


@pytest.fixture(scope='module')
def models(tmp_path_factory):
    """Config and checkpoint with random weights of a task."""

    def make(task):
        folder = tmp_path_factory.mktemp(task)
        config = Config.fromfile(CONFIGS[task], import_custom_modules=False)
        config.custom_imports.imports = ['aft_mm.registry']
        config.pop('default_hooks', None)
        if task == 'classes':
            config.model.backbone.arch.num_layers = 2
        config.dump(folder / 'config.py')
        torch.manual_seed(0)
        model = build_model(config)
        for name, parameter in model.named_parameters():
            # Scores of boxes below 1, and boxes of the size of anchors.
            nn.init.normal_(parameter, std=0.03 if 'retina_' in name else 0.3)
        meta = dict(dataset_meta=dict(classes=CLASSES[task].split(',')))
        torch.save(dict(state_dict=model.state_dict(), meta=meta), folder / 'model.pth')
        return folder / 'config.py', folder / 'model.pth'

    return functools.cache(make)


@pytest.fixture
def pictures(pack):
    def find(task, count):
        folder, _, pattern = PICTURES[task].partition('/')
        paths = sorted(pack(folder).glob(pattern))
        return paths[:: max(1, len(paths) // count)][:count]

    return find


def read(folder):
    return json.loads((folder / 'predictions.json').read_text(encoding='utf-8'))


@pytest.mark.parametrize('suffix', SUFFIXES)
@pytest.mark.parametrize('task', CONFIGS)
def test_a_file_predicts_what_the_checkpoint_does(task, suffix, models, pictures, tmp_path):
    if suffix == '.xml':
        pytest.importorskip('openvino', reason='openvino runs the exported graph')
    config, checkpoint = models(task)
    out = tmp_path / f'model{suffix}'
    export([config, checkpoint, out, *WORDS[task]])
    words = [*pictures(task, 5), *(['--score', 0] if task == 'boxes' else [])]
    predict([config, checkpoint, *words, '--device', 'cpu', '--out', tmp_path / 'a'])
    predict([config, out, *words, '--out', tmp_path / 'b'])
    count = 0
    for ours, theirs in zip(read(tmp_path / 'a'), read(tmp_path / 'b'), strict=True):
        for one, other in zip(ours['found'], theirs['found'], strict=True):
            count += 1
            assert one['class_name'] == other['class_name']
            assert one.get('score', 0) == pytest.approx(other.get('score', 0), abs=1e-4)
            assert one.get('share', 0) == pytest.approx(other.get('share', 0), abs=1e-3)
            assert one.get('box', []) == pytest.approx(other.get('box', []), abs=0.05)
        if task == 'masks':
            masks = [picture(tmp_path / x / one['mask']) for x, one in (('a', ours), ('b', theirs))]
            assert (masks[0] != masks[1]).mean() < 1e-3
    assert count >= 5


@pytest.fixture
def classifier(models, tmp_path):
    config, checkpoint = models('classes')
    export([config, checkpoint, tmp_path / 'model.onnx'])
    return config, checkpoint, tmp_path / 'model.onnx'


def test_the_metadata_are_those_of_the_config(classifier):
    config, _, out = classifier
    about = json.loads(out.with_suffix('.json').read_text(encoding='utf-8'))
    assert about['classes'] == CLASSES['classes'].split(',')
    assert about['size'] == [64, 64] and about['dynamic'] is False
    assert about['task'] == 'classification' and about['channels'] == 'RGB'
    edge, crop = about['resize']
    assert edge == dict(
        type='ResizeEdge', edge='short', scale=73, backend='pillow', interpolation='bicubic'
    )
    assert crop['type'] == 'CenterCrop' and crop['crop_size'] == [64, 64]
    settings = Config.fromfile(config).data_preprocessor
    assert about['mean'] == pytest.approx(settings.mean, rel=1e-6)
    assert about['std'] == pytest.approx(settings.std, rel=1e-6)
    texts = FORMATS['.onnx'](out).metadata()
    for key, value in about.items():
        assert (texts[key] if isinstance(value, str) else json.loads(texts[key])) == value


@pytest.mark.slow
def test_metadata_stay_in_every_format(models, tmp_path):
    pytest.importorskip('openvino', reason='openvino reads its file')
    files = [FORMATS[suffix](tmp_path / f'model{suffix}') for suffix in FORMATS]
    config, checkpoint = models('classes')
    for file in files:
        export([config, checkpoint, file.path])
    texts = [file.metadata() for file in files]
    assert texts[0]['classes'] == texts[1]['classes'] == texts[2]['classes']
    assert all(texts[0].items() <= other.items() for other in texts[1:])
    export([config, checkpoint, files[0].path, '--int8'])
    assert texts[0].items() <= files[0].metadata().items()


def test_the_example_gives_the_classes_of_predict(classifier, pictures, capsys):
    config, checkpoint, out = classifier
    example, paths = load_script('examples/predict_onnx'), pictures('classes', 120)
    expected = ImageClassifier(str(config), str(checkpoint), 'cpu')(paths, progress=False)
    capsys.readouterr()
    example.main(str(out), *map(str, paths))
    names = [line.partition('\t')[0] for line in capsys.readouterr().out.splitlines()]
    wrong = sum(name != one['class_name'] for name, one in zip(names, expected, strict=True))
    assert len({*names}) > 3 and wrong == 0


def test_the_input_of_the_example_is_that_of_the_model(classifier, pictures):
    config, checkpoint, out = classifier
    about = json.loads(out.with_suffix('.json').read_text(encoding='utf-8'))
    prepare = load_script('examples/predict_onnx').prepare
    classify = ImageClassifier(str(config), str(checkpoint), 'cpu')
    for path in pictures('classes', 10):
        sample = dict(inputs=[classify.preprocess(path)['inputs']])
        pixels = classify.model.data_preprocessor(sample, False)['inputs']
        levels = (prepare(path, about, about['channels']) - pixels.numpy()) * np.reshape(
            about['std'], (3, 1, 1)
        )
        assert abs(levels).max() < 2.01  # of 255: decoders of JPEG differ by 1


@pytest.mark.parametrize('task', ['boxes', 'masks'])
def test_each_host_is_described(task, models, tmp_path):
    """mmdet and mmseg read BGR, which their preprocessors turn and whose padding they mark."""
    config, checkpoint = models(task)
    export([config, checkpoint, tmp_path / 'model.pt2', *WORDS[task]])
    about = json.loads((tmp_path / 'model.json').read_text(encoding='utf-8'))
    preprocessor = load_model(str(config), str(checkpoint), 'cpu')[1].data_preprocessor.preprocessor
    assert about['mean'] == pytest.approx(preprocessor.mean.flatten().tolist(), rel=1e-6)
    assert about['channels'] == 'RGB' and len(about['std']) == 3
    assert about['size'] == ([288, 384] if task == 'boxes' else [360, 480])
    steps = [(step['type'], step['backend']) for step in about['resize']]
    assert steps == ([('Resize', 'cv2')] if task == 'boxes' else [])


def test_files_that_do_not_fit_are_refused(classifier, models, pictures, tmp_path):
    config, checkpoint, out = classifier
    image = [*pictures('classes', 1), '--out', tmp_path / 'out']
    stops(
        '--device has no effect on .*model.onnx', predict, [config, out, *image, '--device', 'cpu']
    )
    stops("no.onnx' does not exist", predict, [config, tmp_path / 'no.onnx', *image])
    stops('got a file for classification', predict, [models('boxes')[0], out, *image])
    maps = tmp_path / 'maps.pt2'
    export([config, checkpoint, maps, '--backbone'])
    stops('without --backbone, got a file for features', predict, [config, maps, *image])
    small = tmp_path / 'small.pt2'
    export([config, checkpoint, small, '--size', 32, 48])
    stops('images of 32 x 48 pixels .* got 64 x 64; export with', predict, [config, small, *image])
    notes = tmp_path / 'boxes.json'
    for text in ('{"annotations": []}', '[1]', 'text'):
        notes.write_text(text)
        stops("boxes.json' must be free", export, [config, checkpoint, notes.with_suffix('.pt2')])
        assert notes.read_text() == text and not notes.with_suffix('.pt2').exists()
    shutil.copy(ROOT / 'README.md', tmp_path / 'text.onnx')
    stops("text.onnx'", predict, [config, tmp_path / 'text.onnx', *image])
    assert not (tmp_path / 'out').exists()
