"""ImageClassifier: inputs, batches, class names, pictures."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import DATASETS, DefaultScope
from mmpretrain.structures import DataSample
from PIL import Image

from aft_mm.apis import ImageClassifier, ImagePredictor, SpeechRecognizer, load_model
from aft_mm.errors import UserError

from ..errors import refuses, refuses_input
from ..helpers import drop

CLASSES = ('ant', 'bee', 'cat', 'dog', 'elk')
CLASSES_OF_CONFIG = [
    ('mmpretrain.models', 'ImageClassifier'),
    ('aft_mm.models', 'AFTViT'),
    ('mmcv.transforms', 'LoadImageFromFile'),
]


@pytest.fixture(scope='module')
def classify(tiny_classifier):
    return ImageClassifier(*tiny_classifier, 'cpu')


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    sizes = {'b/2.png': (8, 12), 'a/1.jpg': (20, 31), 'a/0.png': (8, 12), 'b/4.png': (8, 12)}
    for name, size in {**sizes, 'a/3.JPEG': (9, 9)}.items():
        path = tmp_path / 'images' / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8))
        image.save(path, format='PNG' if name.endswith('png') else 'JPEG')
    (tmp_path / 'images/notes.txt').write_text('no image')
    return tmp_path / 'images'


def test_a_folder_is_classified_as_in_a_test(classify, folder, capsys):
    results = classify(folder, batch_size=2)
    captured = capsys.readouterr()
    assert '100%' in captured.err and captured.out == ''
    assert [result['path'] for result in results] == sorted(
        str(path) for path in folder.rglob('?.*')
    )
    pipeline = classify.config.test_dataloader.dataset.pipeline
    settings = dict(data_root=str(folder), test_mode=True, pipeline=pipeline)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        dataset = DATASETS.build(dict(settings, type='CustomDataset'))
    for result, sample in zip(results, dataset, strict=True):
        batch = dict(inputs=[sample['inputs']], data_samples=[sample['data_samples']])
        (expected,) = classify.model.test_step(batch)
        np.testing.assert_allclose(result['scores'], expected.pred_score, rtol=1e-4)
        assert result['label'] == int(expected.pred_label)
        assert result['score'] == result['scores'].max()
        assert result['class_name'] == CLASSES[result['label']]
    assert len({result['score'] for result in results}) == 5


def test_paths_arrays_and_lists_of_both_are_the_same(classify, folder, capsys):
    path = folder / 'a/0.png'
    array = np.array(Image.open(path))  # RGB, where OpenCV would read BGR
    together = classify([path, array, str(path)], progress=False)
    assert capsys.readouterr().err == ''
    (alone,) = classify(array, progress=False)
    for given in (Image.open(path), np.dstack([array, np.full((8, 12), 255, np.uint8)])):
        np.testing.assert_array_equal(classify(given, progress=False)[0]['scores'], alone['scores'])
    refuses('progress must be True or False', classify, array, progress='no')
    assert 'path' not in alone and together[2]['path'] == str(path)
    for result in together:
        np.testing.assert_allclose(result['scores'], alone['scores'], rtol=1e-5)
    (other,) = classify(array[..., ::-1].copy(), progress=False)
    assert np.abs(other['scores'] - alone['scores']).max() > 1e-3


def test_grey_pixels_of_any_form_are_classified_alike(classify, tmp_path):
    grey = np.random.default_rng(0).integers(0, 256, (8, 12), dtype=np.uint8)
    Image.fromarray(grey).save(tmp_path / 'a.png')
    deep = grey.astype(np.uint16) * 257
    forms = [tmp_path / 'a.png', grey, grey[..., None], deep, Image.fromarray(grey)]
    scores = [result['scores'] for result in classify(forms, progress=False)]
    assert all(np.array_equal(one, scores[0]) for one in scores)


def test_a_model_in_training_predicts_as_in_a_test(tiny_classifier, folder):
    config, model = load_model(*tiny_classifier, 'cpu')
    classify, path = ImageClassifier(config, model), folder / 'a/0.png'
    model.backbone.register_forward_hook(drop)
    (expected,) = classify(path, progress=False)
    model.train()
    model.head.eval()  # as a frozen part
    (result,) = classify(path, progress=False)
    np.testing.assert_array_equal(result['scores'], expected['scores'])
    assert model.training and model.backbone.training and not model.head.training
    model.eval().train = None  # a model in evaluation mode keeps the plans of its layers
    (result,) = classify(path, progress=False)
    np.testing.assert_array_equal(result['scores'], expected['scores'])


def test_images_of_several_sizes_are_classified_individually(tiny_classifier, folder):
    """Their pipeline does not resize."""
    config = Config.fromfile(tiny_classifier[0])
    config.test_dataloader.dataset.pipeline = [dict(type='PackInputs')]
    classify = ImageClassifier(config, tiny_classifier[1], 'cpu')
    paths = sorted(folder.rglob('?.*'))
    for path, result in zip(paths, classify(paths, 8, progress=False), strict=True):
        image = np.array(Image.open(path))
        (alone,) = classify(image, progress=False)
        np.testing.assert_allclose(result['scores'], alone['scores'], rtol=1e-4)
        # Datasets of arrays whose preprocessor does not swap channels are RGB.
        inputs = torch.tensor(image).permute(2, 0, 1)
        (expected,) = classify.model.test_step(dict(inputs=[inputs], data_samples=[DataSample()]))
        np.testing.assert_allclose(alone['scores'], expected.pred_score, rtol=1e-4)


def test_names_are_never_those_of_another_dataset(tiny_classifier, tmp_path):
    """mmpretrain's inferencer uses those of ImageNet if the checkpoint has none."""
    config, path = tiny_classifier
    weights = torch.load(path, weights_only=True)
    torch.save(dict(state_dict=weights['state_dict']), tmp_path / 'nameless.pth')
    config = Config.fromfile(config)
    config.test_dataloader.dataset.type = 'ImageNet'
    nameless = ImageClassifier(config, tmp_path / 'nameless.pth', 'cpu')
    array = np.zeros((8, 12, 3), np.uint8)
    assert nameless.classes is None
    assert nameless(array, progress=False)[0]['class_name'] is None
    assert nameless.visualize(array, progress=False)[0].std() > 0
    named = ImageClassifier(config, tmp_path / 'nameless.pth', 'cpu', classes='vwxyz')
    assert named(array, progress=False)[0]['class_name'] in 'vwxyz'
    with pytest.raises(UserError, match='classes must be 5 names, .* got 4'):
        ImageClassifier(config, tmp_path / 'nameless.pth', 'cpu', classes='abcd')


def test_pictures_show_the_prediction_large_enough(classify, folder, tmp_path):
    paths, out = [folder / 'a/0.png', folder / 'b/2.png'], tmp_path / 'pictures'
    pictures = classify.visualize(paths, out, progress=False)
    assert sorted(path.name for path in out.iterdir()) == ['0000_0.png', '0001_2.png']
    for picture, path in zip(pictures, paths, strict=True):
        assert picture.shape == (224, 336, 3)
        image = np.array(Image.open(path))
        # Text in the upper left corner; elsewhere each pixel is a square.
        np.testing.assert_allclose(picture[-14::28, 14::28][-1], image[-1], atol=2)
    read = np.array(Image.open(out / '0001_2.png'))
    np.testing.assert_array_equal(read, pictures[1])


@pytest.mark.parametrize(
    ('images', 'message'),
    [
        ('no.jpg', "images must be files that exist, got 'no.jpg'"),
        ('.', 'images must be folders with images'),
        (__file__, "images must be readable images, got '.*py'"),
        ([3], 'image must be a path, a PIL image or an array .* got 3'),
        (torch.zeros(2, 8, 8), r'image must be a path, .* got torch.float32 \[2, 8, 8\]'),
        (b'a.png', "image must be a path, .* got b'a.png'"),
        (np.zeros((2, 8, 8, 3), np.uint8), r'got a numpy array uint8 \[2, 8, 8, 3\]'),
        (np.zeros((8, 8, 3)), r'got a numpy array float64 \[8, 8, 3\]'),
    ],
)
def test_other_files_give_a_one_line_message(classify, tmp_path, monkeypatch, images, message):
    monkeypatch.chdir(tmp_path)
    refuses_input(message, classify, images, progress=False)


def test_a_predictor_takes_one_path_or_a_list(tiny_classifier, folder):
    predict, path = ImagePredictor(*tiny_classifier, 'cpu'), folder / 'a/0.png'
    (expected,) = predict([str(path)])
    for given in (path, str(path), [path]):
        (found,) = predict(given)
        assert (found.path, found.found) == (str(path), expected.found)
    assert predict([]) == []
    sizes = []
    model = predict.classifier.model
    handle = model.backbone.register_forward_hook(lambda _, x, y: sizes.append(len(x[0])))
    assert len(predict(folder)) == len(sizes) > 1 == max(sizes)
    handle.remove()
    image = Image.open(path)
    for given in (image, np.array(image), [np.array(image)]):
        (found,) = predict(given)
        assert (found.path, found.found) == ('', expected.found)
        np.testing.assert_array_equal(found.picture, expected.picture)
    refuses('image must be a path, .* got None', predict, None)
    refuses('score must be a finite number, 0 to 1', ImagePredictor, *tiny_classifier, score='x')


def test_a_config_of_classes_is_as_one_of_names(tiny_classifier, folder):
    """mmengine's pure Python configs import the classes."""
    text = Path(tiny_classifier[0]).read_text()
    for module, name in CLASSES_OF_CONFIG:
        text, found = re.subn(rf"type='([\w.]+\.)?{name}'", f'type={name}', text)
        text = f'from {module} import {name}\n{text}'
        assert found
    Path(folder, 'lazy.py').write_text(text)
    assert isinstance(Config.fromfile(folder / 'lazy.py').model.type, type)
    files, path = (folder / 'lazy.py', tiny_classifier[1]), folder / 'a/0.png'
    (expected,) = ImageClassifier(*tiny_classifier, 'cpu')(path, progress=False)
    (result,) = ImageClassifier(*files, 'cpu')(path, progress=False)
    np.testing.assert_array_equal(result['scores'], expected['scores'])
    assert ImagePredictor(*files, 'cpu')(path)[0].found[0]['label'] == expected['label']
    with pytest.raises(UserError, match='must have units for SpeechRecognizer'):
        SpeechRecognizer(*files)
    config = Config.fromfile(files[0])
    config.pop('test_dataloader')
    refuses_input('must have a test_dataloader with a pipeline', ImageClassifier, config, files[1])


def test_another_task_is_named(untrained):
    with pytest.raises(UserError, match='must be the config of an image classifier, got .*Auto'):
        ImageClassifier(*untrained['tiny_text'])
    with pytest.raises(ValueError, match='batch_size must be an int, 1 or larger, got 0'):
        ImageClassifier.__call__(None, [], batch_size=0)
