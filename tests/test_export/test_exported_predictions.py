"""Exported files say how to feed them, and predict what the checkpoint does, on real pictures."""

import functools
import json
import re
import shutil
from itertools import product

import numpy as np
import pytest
import torch
from mmengine.config import Config
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

from aft_mm.apis import ImageClassifier, load_model
from aft_mm.apis.loading import build_model
from aft_mm.export.files import FORMATS
from aft_mm.images import read_rgb

from ..errors import stops
from ..helpers import ROOT, command, load_script, nightly, picture
from ..test_images import KINDS, save

pytestmark = pytest.mark.slow

onnx = pytest.importorskip('onnxscript', reason='onnxscript writes the graphs')
pytest.importorskip('onnxruntime', reason='onnxruntime runs the graphs')
export, predict = command('export'), command('predict')
CLASSES = {
    'classes': 'tench,English springer,cassette player,chain saw,church,Φ,truck,pump,"ball",<&>',
    'boxes': 'RBC,WBC,Platelets',
    'grey': '0,1,2,3,4,5,6,7,8,9',
    'masks': 'sky,building,pole,road,pavement,tree,sign,fence,car,pedestrian,bicyclist',
}
CONFIGS = {
    'classes': ROOT
    / 'configs/image_classification/aft-conv-mini-h96-k7_1xb50-40e_imagenette-64px.py',
    'boxes': ROOT / 'tests/configs/tiny_detection.py',
    'grey': ROOT / 'configs/image_classification/aft-conv-quickstart_1xb64-50e_digits.py',
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
        if task == 'grey':  # of any size
            config.test_dataloader.dataset.pipeline = [dict(type='PackInputs')]
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


@pytest.fixture(scope='module')
def exported(models):
    """The model in a format."""

    def call(task, suffix):
        config, checkpoint = models(task)
        out = checkpoint.with_suffix(suffix)
        export([config, checkpoint, out, *WORDS[task]])
        return out

    return functools.cache(call)


@pytest.fixture
def pictures(pack):
    def find(task, count):
        folder, _, pattern = PICTURES[task].partition('/')
        paths = sorted(pack(folder).glob(pattern))
        return paths[:: max(1, len(paths) // count)][:count]

    return find


def read(folder):
    return json.loads((folder / 'predictions.json').read_text(encoding='utf-8'))


FIRST = ('classes', '.pt2'), ('boxes', '.onnx')


@pytest.mark.parametrize(
    'task, suffix', nightly(product(PICTURES, FORMATS), lambda *case: case not in FIRST)
)
def test_a_file_predicts_what_the_checkpoint_does(
    task, suffix, models, exported, pictures, tmp_path
):
    if suffix == '.xml':
        pytest.importorskip('openvino', reason='openvino runs the exported graph')
    config, checkpoint = models(task)
    out = exported(task, suffix)
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


@pytest.fixture(scope='module')
def balanced(tmp_path_factory):
    return tmp_path_factory.mktemp('balanced')


@pytest.fixture
def classifier(models, pictures, balanced):
    """Config, checkpoint and OUT.onnx of a classifier that gives its classes about equally often."""
    config, checkpoint = models('classes')
    files = config, balanced / 'balanced.pth', balanced / 'model.onnx'
    if files[2].exists():
        return files
    classify = ImageClassifier(str(config), str(checkpoint), 'cpu')
    inputs = [classify.preprocess(path)['inputs'] for path in pictures('classes', 50)]
    scores = classify.model(classify.model.data_preprocessor(dict(inputs=inputs), False)['inputs'])
    weights = torch.load(checkpoint)
    weights['state_dict']['head.fc.bias'] -= scores.mean(0)
    torch.save(weights, files[1])
    export([*files])
    return files


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
    assert about.pop('file') == 'model.onnx'
    texts = FORMATS['.onnx'](out).metadata()
    for key, value in about.items():
        assert (texts[key] if isinstance(value, str) else json.loads(texts[key])) == value


@pytest.mark.nightly
def test_metadata_stay_in_every_format(models, exported, tmp_path):
    pytest.importorskip('openvino', reason='openvino reads its file')
    texts = [FORMATS[suffix](exported('classes', suffix)).metadata() for suffix in FORMATS]
    assert texts[0]['classes'] == texts[1]['classes'] == texts[2]['classes']
    assert all(texts[0].items() <= other.items() for other in texts[1:])
    file = FORMATS['.onnx'](tmp_path / 'model.onnx')
    export([*models('classes'), file.path, '--int8'])
    assert texts[0].items() <= file.metadata().items()


def test_the_example_gives_the_classes_of_predict(classifier, pictures):
    config, checkpoint, out = classifier
    example, paths = load_script('examples/predict_onnx'), pictures('classes', 120)
    expected = ImageClassifier(str(config), str(checkpoint), 'cpu')(paths, progress=False)
    names = list(example.classify(out, paths))
    assert len({*names}) > 3
    assert names == [one['class_name'] for one in expected]


@pytest.mark.parametrize('rule', ['thr', 'topk'])
def test_a_multi_label_file_says_so(rule, classifier, multi_label, pictures, tmp_path, capsys):
    paths, out = pictures('classes', 40), tmp_path / 'labels.onnx'
    every = ImageClassifier(*multi_label(*classifier[:2]), 'cpu')(paths, progress=False)
    # The widest gap between scores of which some images have none above.
    low, high = np.quantile([one['scores'].max() for one in every], [0.1, 0.5])
    scores = np.sort(np.concatenate([one['scores'] for one in every]))
    scores = scores[(scores > low) & (scores < high)]
    thr = float(scores[np.diff(scores).argmax() :][:2].mean())
    value = thr if rule == 'thr' else 2
    config, checkpoint = multi_label(*classifier[:2], **{rule: value})
    whole = Config.fromfile(config)
    rows = [dict(img_path=str(path), gt_label=[*{i % 10, 3}]) for i, path in enumerate(paths)]
    text = json.dumps(dict(metainfo=dict(classes=CLASSES['classes'].split(',')), data_list=rows))
    (tmp_path / 'truth.json').write_text(text)
    whole.test_dataloader.update(num_workers=0, persistent_workers=False)
    whole.test_dataloader.dataset = dict(
        type='MultiLabelDataset',
        ann_file=str(tmp_path / 'truth.json'),
        pipeline=whole.test_dataloader.dataset.pipeline,
    )
    whole.test_evaluator = dict(type='MultiLabelMetric', thr=thr, average=None)
    whole.dump(config)
    export([config, checkpoint, out, '--test'])
    printed = capsys.readouterr().out
    about = json.loads(out.with_suffix('.json').read_text(encoding='utf-8'))
    assert about['task'] == 'multi-label classification'
    assert {key: about[key] for key in ('thr', 'topk') if key in about} == {rule: value}
    classify = ImageClassifier(config, checkpoint, 'cpu')
    expected = classify(paths, progress=False)
    names = [', '.join(one['class_names']) or 'no label' for one in expected]
    assert list(load_script('examples/predict_onnx').classify(out, paths)) == names
    assert len({*names}) > 5 and ('no label' in names) == (rule == 'thr')
    # The recall of class 3, which each image has.
    recall = f'{100 * np.mean([one["scores"][3] >= thr for one in expected]):.2f}'
    ((ours, theirs),) = re.findall(r'recall\S+ ([\d. ]+) -> ([\d. ]+)', printed)
    assert ours.split()[3] == theirs.split()[3] == recall

    predict([config, out, *paths, '--out', tmp_path / 'a'])
    found = [[x['label'] for x in one['found'] if x['accepted']] for one in read(tmp_path / 'a')]
    assert found == [one['labels'] for one in expected]
    image = [paths[0], '--out', tmp_path / 'b']
    for files, task in (((classifier[0], out), 'multi-label '), ((config, classifier[2]), '')):
        stops(f'got a file for {task}classification', predict, [*files, *image])


def test_the_input_of_the_example_is_that_of_the_model(classifier, pictures):
    config, checkpoint, out = classifier
    about = json.loads(out.with_suffix('.json').read_text(encoding='utf-8'))
    prepare = load_script('examples/predict_onnx').prepare
    how = [about[key] for key in ('resize', 'mean', 'std', 'channels')]
    classify = ImageClassifier(str(config), str(checkpoint), 'cpu')
    for path in pictures('classes', 10):
        sample = dict(inputs=[classify.preprocess(path)['inputs']])
        pixels = classify.model.data_preprocessor(sample, False)['inputs'].numpy()
        levels = (prepare(path, *how) - pixels) * np.reshape(about['std'], (3, 1, 1))
        assert abs(levels).max() < 1.01  # of 255: decoders of JPEG differ by 1
    how[0] = [dict(type='Resize', scale=[64, 64], backend='cv2')]
    with pytest.raises(SystemExit, match='use aft_mm predict; .*Resize'):
        prepare(path, *how)


def test_the_example_reads_pictures_as_predict_does(tmp_path):
    read = load_script('examples/predict_onnx').read
    for name, (array, options, *_) in KINDS.items():
        if name.startswith('xmp'):  # by which Pillow turns
            continue
        save(tmp_path, array, name, **options)
        found = np.asarray(read(tmp_path / name).convert('RGB'))
        assert np.array_equal(found, read_rgb(tmp_path / name)[0]), name
    Image.new('F', (3, 3)).save(tmp_path / 'floats.tif')
    (tmp_path / 'no.jpg').write_bytes(b'\xff\xd8\xff')
    for name in ('floats.tif', 'no.jpg', 'missing.jpg'):
        with pytest.raises(SystemExit, match=f'{name} (has|cannot be read)'):
            read(tmp_path / name)


def test_a_file_of_another_input_says_so(classifier, tmp_path):
    config, checkpoint, out = classifier
    whole = Config.fromfile(config)
    whole.data_preprocessor.mean = [0.0, 0.0, 0.0]
    whole.dump(tmp_path / 'other.py')
    Image.new('RGB', (40, 40)).save(tmp_path / 'a.png')
    words = [tmp_path / 'other.py', out, tmp_path / 'a.png', '--out', tmp_path / 'p']
    stops('mean of .*model.onnx. must be that of .*other.py, .0.0, 0.0, 0.0', predict, words)
    export([config, checkpoint, tmp_path / 'wide.onnx', '--size', 80, 64])
    about = json.loads((tmp_path / 'wide.json').read_text())
    assert about['size'] == [80, 64] and 'resize' not in about and about['file'] == 'wide.onnx'
    with pytest.raises(SystemExit, match='does not say how to resize images'):
        [*load_script('examples/predict_onnx').classify(tmp_path / 'wide.onnx', [])]
    stops(
        'wide.json. holds the metadata of wide.onnx, whose size is another; remove',
        export,
        [config, checkpoint, tmp_path / 'wide.pt2', '--size', 96, 64],
    )
    assert (tmp_path / 'wide.json').exists()
    export([config, checkpoint, tmp_path / 'wide.pt2', '--size', 80, 64])


@pytest.mark.parametrize('task', nightly(['boxes', 'masks'], ['masks']))
def test_each_host_is_described(task, models, exported, tmp_path):
    """mmdet and mmseg read BGR, which their preprocessors turn and whose padding they mark."""
    config, checkpoint = models(task)
    out = exported(task, '.onnx')
    about = json.loads(out.with_suffix('.json').read_text(encoding='utf-8'))
    preprocessor = load_model(str(config), str(checkpoint), 'cpu')[1].data_preprocessor.preprocessor
    assert about['mean'] == pytest.approx(preprocessor.mean.flatten().tolist(), rel=1e-6)
    assert about['channels'] == 'RGB' and len(about['std']) == 3
    assert about['size'] == ([288, 384] if task == 'boxes' else [360, 480])
    steps = [(step['type'], step['backend']) for step in about['resize']]
    assert steps == ([('Resize', 'cv2')] if task == 'boxes' else [])
    if task == 'boxes':  # 384 x 240 pixels, padded to a multiple of 32
        Image.new('RGB', (640, 400)).save(tmp_path / 'wide.png')
        words = [config, out, tmp_path / 'wide.png', '--out', tmp_path / 'a']
        stops('knows no padding, which', predict, words)


def test_the_example_averages_over_areas_like_opencv(tmp_path, models):
    """The digits, enlarged to sizes that 8 divides and to others."""
    config, checkpoint = models('grey')
    whole = Config.fromfile(config)
    steps = [dict(type='Resize', scale=8, interpolation='area'), dict(type='PackInputs')]
    whole.test_dataloader.dataset.pipeline = steps
    whole.dump(tmp_path / 'digits.py')
    out, paths = tmp_path / 'model.onnx', []
    for number, pixels in enumerate(load_digits().images[:300]):
        paths.append(str(tmp_path / f'{number}.png'))
        size = (8, 16, 27, 50)[number % 4]
        image = Image.fromarray(np.uint8(15 * pixels))
        image.resize((size, size), Image.Resampling.BICUBIC).save(paths[-1])
    classify = ImageClassifier(str(tmp_path / 'digits.py'), str(checkpoint), 'cpu')
    inputs = [classify.preprocess(path)['inputs'] for path in paths]
    with torch.no_grad():  # for classes that are about equally frequent
        batch = classify.model.data_preprocessor(dict(inputs=inputs), False)['inputs']
        classify.model.head.fc.bias -= classify.model(batch).mean(0)
    weights = dict(torch.load(checkpoint), state_dict=classify.model.state_dict())
    torch.save(weights, tmp_path / 'balanced.pth')
    export([tmp_path / 'digits.py', tmp_path / 'balanced.pth', out])
    expected = [one['class_name'] for one in classify(paths, progress=False)]
    example = load_script('examples/predict_onnx')
    assert [*example.classify(out, paths)] == expected and len({*expected}) > 3
    resize = json.loads((tmp_path / 'model.json').read_text())['resize']
    for path, pixels in zip(paths, inputs, strict=True):
        assert np.abs(example.prepare(path, resize, 0, 1, 'grey')[0] - pixels.numpy()).max() <= 1
    Image.new('L', (6, 9)).save(tmp_path / 'small.png')
    with pytest.raises(SystemExit, match='use aft_mm predict; .*Resize'):
        [*example.classify(out, [tmp_path / 'small.png'])]


@pytest.mark.nightly
def test_an_open_graph_takes_grey_pictures_of_any_size(models, tmp_path):
    config, checkpoint = models('grey')
    out, paths = tmp_path / 'model.onnx', []
    for number, pixels in enumerate(load_digits().images[:6]):
        paths.append(tmp_path / f'{number}.png')
        height = 8 - number % 2
        Image.fromarray(np.uint8(15 * pixels[:height])).save(paths[-1])
    export([config, checkpoint, out, '--dynamic'])
    about = json.loads((tmp_path / 'model.json').read_text())
    assert about['channels'] == 'grey' and about['resize'] == [] and about['dynamic'] is True
    for name, file, words in (('a', checkpoint, ['--device', 'cpu']), ('b', out, [])):
        predict([config, file, *paths, '--out', tmp_path / name, *words])
    ours, theirs = ([one['found'][0] for one in read(tmp_path / name)] for name in 'ab')
    names = [one['class_name'] for one in ours]
    assert names == [one['class_name'] for one in theirs]
    assert names == list(load_script('examples/predict_onnx').classify(out, paths))
    scores = [one['score'] for one in theirs]
    assert [one['score'] for one in ours] == pytest.approx(scores, abs=1e-5)


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
    notes = tmp_path / 'boxes.json'
    for text in ('{"annotations": []}', '[1]', 'text'):
        notes.write_text(text)
        stops("boxes.json' must be free", export, [config, checkpoint, notes.with_suffix('.pt2')])
        assert notes.read_text() == text and not notes.with_suffix('.pt2').exists()
    shutil.copy(ROOT / 'README.md', tmp_path / 'text.onnx')
    stops("text.onnx'", predict, [config, tmp_path / 'text.onnx', *image])
    assert not (tmp_path / 'out').exists()
    small = tmp_path / 'small.pt2'
    export([config, checkpoint, small, '--size', 32, 48])
    stops('images of 32 x 48 pixels .* got 64 x 64; export with', predict, [config, small, *image])
