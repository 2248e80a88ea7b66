"""What a training and a prediction say at their end, and names and files that must not stop them."""

import json
import math
import re
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from mmengine.config import Config
from mmengine.registry import TRANSFORMS, DefaultScope
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from mmengine.visualization import Visualizer
from PIL import Image

from aft_mm.analysis.browse_dataset import draw_titled_images
from aft_mm.analysis.confusion_matrix import draw_confusion
from aft_mm.analysis.plot_cam import draw_cams
from aft_mm.analysis.plot_curves import draw_curves
from aft_mm.analysis.plot_features import draw_features
from aft_mm.analysis.training_summary import listed, summarize, weakest, wilson_interval
from aft_mm.apis import ImageClassifier, ImagePredictor
from aft_mm.apis.images import draw_inside
from aft_mm.cli.commands import train as training
from aft_mm.cli.main import main
from aft_mm.datasets import Digits
from aft_mm.engine import SafeCheckpointHook
from aft_mm.engine.by_class import BoxesByClass, PixelsByClass, matches
from aft_mm.visualization import draw_alignment
from aft_mm.visualization.figures import literal_text

from .errors import stops
from .helpers import ROOT, save_picture
from .test_adversarial.test_exact_resume import write_frames

RNG = np.random.default_rng(0)
DIGITS = [sample['img'] for sample in Digits('test').load_data_list()]
ACCURACY = 'accuracy/top1'
NAMES = ('$', 'a$b$', r'$\frac$', 'x_^', '_private', '100 %', r'\alpha\\', '', 'w' * 400)
NAMES += ('🐈 猫', 'two\nlines', '\x00\x1b[1m\t', '\udcff', '{$x$}', '#&~')


def log(values, losses=(), metric=ACCURACY):
    """Return the records of a run by epoch with a validation after each of 10 iterations."""
    losses = losses or [1.0] * len(values)
    records = []
    for epoch, (value, loss) in enumerate(zip(values, losses, strict=True), 1):
        for iteration in range(10 * epoch - 9, 10 * epoch + 1):
            records.append(dict(iter=iteration, step=iteration, epoch=epoch, loss=loss))
        records.append({'step': epoch, metric: value})
    return records


FALLING = [2.0, 1.6, 1.3, 1.0, 0.8, 0.6, 0.4, 0.2]
UP_AND_DOWN = [40.0, 60.0, 80.0, 78.0, 74.0, 70.0, 66.0, 62.0]


@pytest.mark.parametrize(
    ('values', 'losses', 'number', 'curve', 'step'),
    [
        (
            UP_AND_DOWN,
            FALLING,
            1000,
            r'best at iteration 30, then fell to 64 while .*: overf',
            'data',
        ),
        (UP_AND_DOWN, FALLING[::-1], 1000, 'and the training loss did not fall', 'rate'),
        (UP_AND_DOWN, FALLING, 20, 'flat', ''),  # the interval of 20 samples is wider than the fall
        (UP_AND_DOWN[::-1][:5] + [80.0, 85.0, 90.0], FALLING, 1000, 'still improving', 'longer'),
        ([10.0, 60.0, 80.0, 80.5, 80.0, 80.2, 80.4, 80.1], FALLING, 1000, 'flat', ''),
        ([50.0, 40.0], [1.0, 0.5], 1000, 'fewer than 50 iterations', ''),
        ([80.0], [1.0], 1000, 'fewer than 50 iterations', ''),
    ],
)
def test_a_curve_is_judged_by_more_than_its_noise(values, losses, number, curve, step):
    found = summarize(log(values, losses), ACCURACY, number)
    assert found.step == step
    assert re.search(curve, found.sentences['trend'])
    assert ('the best of' in found.sentences['validated']) == (len(values) > 1)


def test_only_a_share_of_samples_has_an_interval():
    records = log([20.0, 30.0, 36.0, 40.0, 46.0, 47.0], [1.0] * 6)
    sentence = summarize(records, ACCURACY, 60).sentences['validated']
    assert (
        sentence.startswith('on 60 samples: 95 % interval 34.6 to 59.1 %')
        and 'best of 6' in sentence
    )
    for metric in ('mIoU', 'coco/bbox_mAP', 'bits_per_char', 'token_accuracy'):
        sentence = summarize(log([0.1] * 4, metric=metric), metric, 58).sentences['validated']
        assert sentence.startswith('on 58 samples; the best of 4') and 'interval' not in sentence
    bits = summarize(
        log([3.0, 2.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5], FALLING, 'b'), 'b', 9, rule='less'
    )
    assert 'best at iteration 30, then rose to 3.25' in bits.sentences['trend']
    assert summarize(log([1.0]), 'another', 9) == ({}, '')
    unknown = summarize(log(UP_AND_DOWN, FALLING, 'my/rmsd'), 'my/rmsd', 9, rule='')
    assert unknown == ({'validated': 'on 9 samples'}, '')


class Labelled(torch.utils.data.Dataset):
    def __init__(self, number):
        self.number = number

    def __len__(self):
        return self.number

    def get_gt_labels(self):  # of the whole set, as mmpretrain's
        return [0] * 30 + [1] * 70


def test_only_what_a_shortened_loader_reads_counts(monkeypatch):
    monkeypatch.setattr(training, 'summarize', lambda *args: args)
    for number, options, expected in (
        (40, {}, (40, 75.0)),
        (100, dict(drop_last=True), (96, 70.0)),
        (100, {}, (100, 70.0)),
    ):
        loader = torch.utils.data.DataLoader(Labelled(number), 16, **options)
        runner = SimpleNamespace(val_loop=SimpleNamespace(dataloader=loader))
        for hook, rule in ((SafeCheckpointHook(), 'greater'), (None, '')):
            *_, counted, found, commonest = training.summary_of(runner, log([80.0]), hook, '')
            assert (counted, commonest) == expected and found == rule


@pytest.mark.parametrize('loop', [EpochBasedTrainLoop, IterBasedTrainLoop])
@pytest.mark.parametrize(
    'last',
    [
        dict(type='CosineAnnealingLR', T_max=8, begin=2, convert_to_iter_based=True),
        dict(type='CosineAnnealingLR', T_max=48, begin=12, by_epoch=False, end=60),
        dict(type='CosineAnnealingLR', begin=12, by_epoch=False, end=60),
        dict(type='OneCycleLR', total_steps=60, by_epoch=False),
        dict(type='CosineAnnealingLR', T_max=5),
        dict(type='CosineAnnealingLR', T_max=None, begin=60, by_epoch=False),
        dict(type='MultiStepLR', milestones=[3, 6]),
    ],
)
def test_longer_training_is_advised_with_its_schedule(loop, last):
    cfg = Config(dict(param_scheduler=[dict(type='LinearLR', end=2), last], optim_wrapper={}))
    runner = SimpleNamespace(
        cfg=cfg, max_epochs=10, max_iters=60, train_loop=loop.__new__(loop), iter=60
    )
    words = training.advice('longer', runner, 'a.py').split(' --cfg-options ')[1].split()
    options = {key: int(value) for key, value in (word.split('=') for word in words)}
    length = 'max_epochs=20' if loop is EpochBasedTrainLoop else 'max_iters=120'
    assert words[0] == f'train_cfg.{length}'
    for key in ('end', 'T_max', 'total_steps'):
        longer = options.get(f'param_scheduler.1.{key}')
        more = 10 if last.get('by_epoch', True) else 60
        assert longer == (last[key] + more if last.get(key) not in (None, 5) else None)


def test_an_accuracy_of_the_commonest_class_is_no_result():
    frozen = [{'iter': 1, 'step': 1, 'epoch': 1}, {'step': 1, ACCURACY: 30.0}]
    for records, step in ((log([30.0] * 6), 'look'), (log([30.0, 33.0]), ''), (frozen, 'look')):
        found = summarize(records, ACCURACY, 50, commonest=28.0)
        assert found.step == step and found.sentences['chance'].endswith('gives 28.0 %')
    assert 'chance' not in summarize(log([30.0, 63.0]), ACCURACY, 50, commonest=28.0).sentences


@pytest.mark.parametrize('number', [1, 3, 19])
def test_few_validated_samples_give_no_advice(number):
    for values in ([0.0] * 8, UP_AND_DOWN, UP_AND_DOWN[::-1]):
        found = summarize(log(values, FALLING), ACCURACY, number, commonest=50.0)
        low = wilson_interval(max(values), number)[0]
        assert found.step == '' and ('chance' in found.sentences) == (low <= 50.0)
        assert found.sentences.keys() <= {'validated', 'chance'}
        assert found.sentences['validated'].endswith(' %; so few say almost nothing')
    assert summarize(log([0.0] * 6), ACCURACY, 20, commonest=50.0).step == 'look'


def test_the_weakest_classes_are_named():
    values = dict(sky=0.9, pole=0.0, road=0.8, sign=0.0, bike=math.nan)
    assert weakest('IoU', values) == (
        'IoU is 0 for 2 of 4 classes: pole, sign; 1 of 5 classes have no sample there'
    )
    assert weakest('AP50', dict(RBC=0.5, WBC=0.8, Platelets=0.123)) == 'Platelets 12.3 % AP50'
    assert listed(map(str, range(40))) == '0, 1, 2, 3, 4 and 35 more'


def boxes(number, classes=3):
    corners = RNG.uniform(0, 90, (number, 2))
    corners = np.hstack([corners, corners + RNG.uniform(8, 60, (number, 2))])
    return torch.tensor(corners), torch.tensor(RNG.integers(0, classes, number))


def detections():
    """Return 20 images whose predicted boxes are shifted objects or others, with repeated scores."""
    for _ in range(20):
        truth, labels = boxes(RNG.integers(0, 7))
        others, more = boxes(RNG.integers(0, 5))
        found = torch.cat([truth + torch.tensor(RNG.normal(0, 5, truth.shape)), others])
        scores = torch.tensor(RNG.random(len(found)).round(2))
        yield dict(
            pred_instances=dict(bboxes=found, labels=torch.cat([labels, more]), scores=scores),
            gt_instances=dict(bboxes=truth, labels=labels),
        )


def test_ap_equals_pycocotools_and_the_score_has_the_best_f1():
    COCO = pytest.importorskip('pycocotools.coco', reason='needs pycocotools').COCO  # noqa: N806
    from pycocotools.cocoeval import COCOeval

    samples = list(detections())
    metric = BoxesByClass()
    metric.dataset_meta = dict(classes=('a', '$b', '_c'))
    metric.process(None, samples)
    stored = []
    metric.store = stored.extend
    found = metric.evaluate(len(samples))

    marks, results = [], []
    for image, sample in enumerate(samples):
        for part, into in ((sample['gt_instances'], marks), (sample['pred_instances'], results)):
            for row, (box, label) in enumerate(zip(part['bboxes'], part['labels'], strict=True)):
                x1, y1, x2, y2 = box.tolist()
                one = dict(
                    image_id=image + 1, category_id=int(label), bbox=[x1, y1, x2 - x1, y2 - y1]
                )
                if 'scores' in part:
                    one['score'] = float(part['scores'][row])
                area = (x2 - x1) * (y2 - y1)
                into.append(dict(one, id=len(into) + 1, area=area, iscrowd=0))
    truth = COCO()
    images = [dict(id=image + 1) for image in range(len(samples))]
    truth.dataset = dict(
        images=images, annotations=marks, categories=[dict(id=i) for i in range(3)]
    )
    truth.createIndex()
    run = COCOeval(truth, truth.loadRes(results), 'bbox')
    run.evaluate()
    run.accumulate()
    np.testing.assert_allclose(stored, run.eval['precision'][0, :, :, 0, 2].mean(0), atol=1e-9)

    def f1(least):
        hits = number = objects = 0
        for sample in samples:
            part = sample['pred_instances']
            kept = {key: value[part['scores'] >= least] for key, value in part.items()}
            scores, _, right, labels = matches(kept, sample['gt_instances'], {})
            hits, number, objects = hits + right.sum(), number + len(scores), objects + len(labels)
        return 2 * hits / (number + objects)

    every = np.unique(np.concatenate([sample['pred_instances']['scores'] for sample in samples]))
    assert found['best_f1'] == pytest.approx(max(map(f1, every)))
    assert f1(found['best_f1_score']) == pytest.approx(found['best_f1'])


def test_boxes_that_are_no_object_have_no_best_score():
    """Else it would be the default of `aft_mm predict`."""
    box, label = torch.tensor([[0.0, 0.0, 10.0, 10.0]]), torch.zeros(1, dtype=torch.long)
    truth = dict(bboxes=box + 50, labels=label)
    found = dict(bboxes=box, labels=label, scores=torch.ones(1))
    metric = BoxesByClass()
    metric.dataset_meta = dict(classes=('a',))
    metric.process(None, [dict(pred_instances=found, gt_instances=truth)])
    assert metric.evaluate(1) == {}


def test_boxes_over_ignored_objects_do_not_count():
    box = torch.tensor([[0.0, 0.0, 10.0, 10.0]])
    one = dict(bboxes=box, labels=torch.zeros(1, dtype=torch.long))
    nothing = dict(bboxes=box[:0], labels=torch.zeros(0, dtype=torch.long))
    predicted = dict(one, scores=torch.ones(1))
    assert [len(part) for part in matches(predicted, nothing, one)] == [0, 0, 0, 0]
    assert matches(predicted, one, one)[2].tolist() == [True]
    assert matches(predicted, nothing, {})[2].tolist() == [False]
    metric = BoxesByClass()
    metric.dataset_meta = dict(classes=('a',))
    metric.process(
        None, [dict(pred_instances=dict(nothing, scores=torch.ones(0)), gt_instances=one)]
    )
    assert metric.evaluate(1) == {}


def test_iou_of_classes_counts_pixels_that_are_not_ignored():
    IoUMetric = pytest.importorskip('mmseg.evaluation', reason='needs mmseg').IoUMetric  # noqa: N806
    metric = PixelsByClass(IoUMetric(ignore_index=9))
    metric.dataset_meta = dict(classes=('a', 'b', 'c', 'd'))
    stored = []
    metric.store = stored.extend
    true, predicted = (RNG.integers(0, 3, (2, 8, 9)) for _ in range(2))
    true[:, 0] = 9
    parts = [
        dict(
            pred_sem_seg=dict(data=torch.tensor(x)[None]),
            gt_sem_seg=dict(data=torch.tensor(y)[None]),
        )
        for x, y in zip(predicted, true, strict=True)
    ]
    metric.process(None, parts)
    assert metric.evaluate(2) == {}
    for label in range(3):
        one, other = (predicted == label) & (true != 9), true == label
        assert stored[label] == pytest.approx((one & other).sum() / (one | other).sum())
    assert math.isnan(stored[3])


@pytest.mark.filterwarnings('ignore:Glyph', 'ignore:constrained_layout', 'ignore:.*missing from')
def test_any_name_can_be_plotted(tmp_path):
    names, count = list(NAMES), len(NAMES)
    image = RNG.integers(0, 256, (9, 8, 3), dtype=np.uint8)
    pairs = {name: log([1.0, 2.0], metric='m$^') for name in NAMES}
    figures = [
        draw_confusion(RNG.integers(0, 9, (count, count)), names, '$\\'),
        draw_features(RNG.normal(size=(count, 2)), np.arange(count), names, '$\\', '$\\'),
        draw_titled_images([image] * count, names, '$\\'),
        draw_cams([image] * count, RNG.random((count, 9, 8)), names),
        draw_curves(pairs, 'm$^'),
        draw_alignment(np.log(RNG.dirichlet(np.ones(count), 9)), names, 0.1, '$\\^'),
    ]
    for number, figure in enumerate(figures):
        figure.savefig(tmp_path / f'{number}.png', dpi=40)
    labels = [text.get_text() for text in figures[1].legends[0].get_texts()]
    assert len(labels) == count and labels[4] == ' _private'


@pytest.mark.filterwarnings('ignore:Glyph', 'ignore:.*missing from')
def test_formulas_are_drawn_as_text():
    pictures = []
    for text in ('a$b$', 'a$b$', 'a$c$'):
        visualizer = Visualizer(image=np.full((40, 90, 3), 255, np.uint8))
        with literal_text():
            visualizer.draw_texts(text, np.array([4, 4]), colors='k')
            pictures.append(visualizer.get_image())
    (drawn,) = visualizer.ax_save.texts
    assert not drawn.get_parse_math()
    assert (pictures[0] == pictures[1]).all() and (pictures[0] != pictures[2]).any()


@pytest.mark.parametrize('place', [(150, 5), (150, 118), (-30, 60), (5, -20), (60, 60)])
def test_labels_are_inside_the_picture(place):
    white = np.full((120, 160, 3), 255, np.uint8)
    visualizer, free = Visualizer(image=white), Visualizer(image=white)
    draw_inside(visualizer, visualizer.draw_texts, 'Platelets: 97.3', np.array(place), colors='k')
    free.draw_texts('Platelets: 97.3', np.array([60, 60]), colors='k')
    # As much ink as in the middle, none of it at the edge.
    dark, expected = (one.get_image() < 128 for one in (visualizer, free))
    assert dark.sum() == pytest.approx(expected.sum(), rel=0.1)
    assert not (dark[0].any() or dark[-1].any() or dark[:, 0].any() or dark[:, -1].any())


def test_the_quickstart_reads_digits_of_any_size():
    config = Config.fromfile(
        ROOT / 'configs/image_classification/aft-conv-quickstart_1xb64-50e_digits.py'
    )
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        steps = [TRANSFORMS.build(step) for step in config.test_dataloader.dataset.pipeline]

    def packed(image):
        sample = dict(img=image, img_shape=image.shape[:2], ori_shape=image.shape[:2])
        for step in steps:
            sample = step(sample)
        return sample['inputs'].numpy()[0]

    for image in DIGITS[:30]:
        assert (packed(image) == image[..., 0]).all()
        for size in (16, 64, 200):
            large = cv2.resize(image, (size, size), interpolation=cv2.INTER_NEAREST)
            assert np.abs(packed(large[..., None]).astype(int) - image[..., 0]).max() <= 1


def test_another_size_than_that_of_training_is_announced_once(digits_classifier, monkeypatch):
    said = []
    monkeypatch.setattr('aft_mm.apis.images.warn', said.append)
    classify = ImageClassifier(*digits_classifier, 'cpu')
    classify(DIGITS[:3], progress=False)
    assert not said
    large = [image.repeat(2, 0).repeat(3, 1) for image in DIGITS[:3]]
    sentence = classify.unlike_training(classify.preprocess(large[0]))
    assert 'trained on images of 8 x 8 px and gets one of 16 x 24 px' in sentence
    assert not classify.unlike_training(classify.preprocess(DIGITS[0]))
    for _ in range(2):
        classify(large, batch_size=2, progress=False)
    assert said == [sentence]


@pytest.fixture
def pictures(here):
    (here / 'in').mkdir()
    for name in ('a.png', 'b.jpg', 'm.png', 'z.png'):
        Image.fromarray(RNG.integers(0, 256, (8, 12, 3), dtype=np.uint8)).save(f'in/{name}')
    return here


def with_names(files, names, folder):
    checkpoint = torch.load(files[1], weights_only=True)
    checkpoint['meta']['dataset_meta']['classes'] = tuple(names)
    torch.save(checkpoint, folder / 'named.pth')
    return files[0], str(folder / 'named.pth')


@pytest.mark.filterwarnings('ignore:Glyph', 'ignore:.*missing from')
def test_any_class_name_can_be_predicted(pictures, tiny_classifier):
    for first in range(0, len(NAMES), 5):
        names = NAMES[first : first + 5]
        predict = ImagePredictor(*with_names(tiny_classifier, names, pictures), 'cpu')
        assert predict('in/a.png')[0].found[0]['class_name'] in names
        classifier = predict.classifier
        for label in range(5):
            result = dict(label=label, scores=np.eye(5, dtype=np.float32)[label])
            assert classifier.draw('in/a.png', result).shape[2] == 3


@pytest.mark.parametrize(('name', 'text'), [('church', 'church 0.75'), (None, 'class 1 0.75')])
def test_a_picture_names_the_class_first(name, text, pictures, tiny_classifier, monkeypatch):
    classifier, texts = ImageClassifier(*tiny_classifier, 'cpu'), []
    classifier.classes = name and ('ant', name)
    write = Axes.text
    monkeypatch.setattr(
        Axes, 'text', lambda *args, **style: texts.append(args[3]) or write(*args, **style)
    )
    result = dict(label=1, scores=np.float32([0.25, 0.75]))
    drawn = classifier.draw('in/a.png', result)
    assert texts == [text]
    texts.clear()
    result['scores'] = np.float32([0.75, 0.25])
    assert (classifier.draw('in/a.png', result) != drawn).any()


def test_a_bad_picture_costs_no_other_its_result(pictures, tiny_classifier, monkeypatch, capsys):
    good = pictures / 'in/a.png'
    (pictures / 'in/cut.png').write_bytes(good.read_bytes()[:-60])
    (pictures / 'in/empty.jpg').touch()
    Image.new('1', (9000, 9000)).save(pictures / 'in/large.png')
    (pictures / 'in/text.png').write_text('a')
    call = ImageClassifier.preprocess

    def preprocess(self, image):
        if str(image).endswith('m.png'):
            raise RuntimeError('the kernel\nis larger than the image')
        return call(self, image)

    monkeypatch.setattr(ImageClassifier, 'preprocess', preprocess)
    words = ['predict', *tiny_classifier, 'in', '--device', 'cpu', '--out']
    stops('5 of 8 images have no result: .*cut.png.*', main, [*words, 'out'])
    assert '3 images: out/predictions.csv' in capsys.readouterr().out
    written = json.loads((pictures / 'out/predictions.json').read_text())
    results = {one['path']: one for one in written}
    assert [path for path, one in results.items() if 'error' not in one] == [
        'in/a.png',
        'in/b.jpg',
        'in/z.png',
    ]
    assert 'RuntimeError: the kernel is larger' in results['in/m.png']['error']
    assert 'is empty' in results['in/empty.jpg']['error'] and len(results) == 8
    alone = ImageClassifier(*tiny_classifier, 'cpu')('in/z.png', progress=False)
    assert results['in/z.png']['found'][0]['label'] == alone[0]['label']
    stops('is truncated', main, [*words[:3], 'in/cut.png', '--out', 'none'])
    assert not (pictures / 'none').exists()


def test_an_early_stop_has_a_summary(tool, config, here, capfd, with_plots):
    (here / 'my.py').write_text(
        f'_base_ = {config("tiny")!r}\n'
        'train_cfg = dict(max_epochs=9)\n'
        'train_dataloader = dict(num_workers=0)\n'
        "stop = dict(type='EarlyStoppingHook', monitor='accuracy/top1', patience=1, min_delta=99)\n"
        'custom_hooks = [stop]\n'
    )
    option = 'data_preprocessor.mean=[70]'  # the next command needs it, too
    tool('train').main(['my.py', '--work-dir', 'work', '--cfg-options', option])
    shown = capfd.readouterr().out
    # 65 digits in two validations.
    assert re.search(
        r'trained 12 iterations of \d+ ─+\nbest       accuracy/top1 .*\ncheckpoint .*\nvalidated  on 65 samples: 95 % '
        r'interval [\d.]+ to [\d.]+ %; the best of 2 validations',
        shown,
    )
    assert 'next       aft_mm predict work/my.py work/' in shown
    assert Config.fromfile('work/my.py').data_preprocessor.mean == [70]


@pytest.mark.parametrize(
    ('name', 'measure', 'module'),
    [('tiny_detection', 'AP50', 'mmdet'), ('tiny_segmentation', 'IoU', 'mmseg')],
)
@pytest.mark.filterwarnings('ignore:Glyph', 'ignore:.*missing from')
def test_weak_classes_and_the_best_score_are_named(
    name, measure, module, tool, config, here, monkeypatch, capfd
):
    pytest.importorskip(module, reason=f'needs {module}')
    monkeypatch.setattr('aft_mm.engine.by_class.LEAST_IOU', 0.0)  # any box is an object
    write_frames(here)
    tool('train').main(
        [config(name), '--work-dir', 'work', '--cfg-options', 'train_dataloader.num_workers=0']
        # mmengine keeps the visualizers of a process by name, with the folder of an earlier run.
        + ['train_dataloader.persistent_workers=False', f'visualizer.name={name}']
    )
    shown = capfd.readouterr().out
    assert re.search(f'weakest    .*{measure}', shown) and 'validated  on 2 samples; the' in shown
    (best,) = here.glob('work/best_*.pth')
    words = [f'work/{name}.py', str(best)]
    folder = 'camvid/val' if measure == 'IoU' else 'bccd/JPEGImages'
    (image, *_) = sorted(here.glob(f'data/{folder}/*'))
    size = 11 if measure == 'IoU' else 3
    predictors = []
    for first in range(0, len(NAMES) - size + 1, min(4, size)):
        names = NAMES[first : first + size]
        predict = ImagePredictor(*with_names(words, names, here), 'cpu', 0.0)
        (prediction,) = predict(image)
        found = prediction.found
        assert found and all(one['class_name'] == names[one['label']] for one in found)
        predictors.append((predict, prediction.picture))
    earlier, picture = predictors[0]
    assert np.array_equal(earlier(image)[0].picture, picture)
    assert not np.array_equal(predictors[-1][1], picture)
    pixels = cv2.imread(str(image))[..., ::-1]
    for given in (pixels, Image.fromarray(pixels)):
        (of_object,) = predict(given)
        assert (of_object.path, of_object.found) == ('', found)
    if measure == 'IoU':
        tool('plot confusion').main(
            [*words, '--split', 'val', '--out', 'counts.png', '--csv', 'counts.csv']
        )
        rows = (here / 'counts.csv').read_text().splitlines()
        assert rows[0] == 'class,pixels,accuracy,precision' and len(rows) == 12
        assert sum(int(row.split(',')[1]) for row in rows[1:]) > 3000
        return
    score = torch.load(best, weights_only=True)['meta']['dataset_meta']['best_f1_score']
    assert f'at score {score:.3g}' in shown
    tool('publish').main([str(best), 'published.pth'])
    (published,) = here.glob('published-*.pth')
    tool('predict').main([words[0], str(published), str(image), '--out', 'out', '--device', 'cpu'])
    assert f'a score of at least {score:.4g} (of the best F1' in capfd.readouterr().out
    (result,) = json.loads((here / 'out/predictions.json').read_text())
    assert all(box['score'] >= score for box in result['found'])
    stops(
        'is not a classifier .*aft_mm test', tool('plot confusion').main, [*words, '--out', 'a.png']
    )
    stops('is not a classifier', tool('plot features').main, [*words, '--out', 'a.png'])


ML_CONFIG = """_base_ = 'aft_mm::own_data/aft-conv-mini-h96-k7_1xb50-40e_image-folder-64px'
mixer = dict(num_heads=8, kernel_size=3)
arch = dict(embed_dims=16, num_layers=1, mlp_ratio=2)
head = dict(_delete_=True, type='MultiLabelLinearClsHead', num_classes=3, in_channels=16)
model = dict(backbone=dict(arch=arch, token_mixer=mixer), head=head)
data_preprocessor = dict(num_classes=3, to_onehot=True)
pipeline = [dict(type='LoadImageFromFile'), dict(type='PackInputs')]
data = dict(_delete_=True, type='MultiLabelDataset', ann_file='images.json', pipeline=pipeline)
loader = dict(num_workers=0, persistent_workers=False, dataset=data)
train_dataloader = dict(batch_size=3, **loader)
val_dataloader = loader
test_dataloader = loader
val_evaluator = dict(_delete_=True, type='AveragePrecision')
test_evaluator = val_evaluator
train_cfg = dict(max_epochs=1, val_interval=1)
default_hooks = dict(checkpoint=dict(save_best='multi-label/mAP', rule='greater'))
"""


def test_a_classifier_of_several_labels_has_no_confusions(here, capfd):
    labels = [[0], [1], [0, 1], [1, 2], [2], [0, 2]]
    for number in range(len(labels)):
        save_picture(f'{number}.png', RNG.integers(0, 256, (64, 64, 3)))
    samples = [dict(img_path=f'{i}.png', gt_label=classes) for i, classes in enumerate(labels)]
    data = dict(metainfo=dict(classes=['a', 'b', 'c']), data_list=samples)
    (here / 'images.json').write_text(json.dumps(data))
    (here / 'many.py').write_text(ML_CONFIG)
    main(['train', 'many.py', '--work-dir', 'work'])
    shown = capfd.readouterr().out
    assert 'next       aft_mm predict many.py' in shown and '\nconfusion' not in shown
    (best,) = here.glob('work/best_*.pth')
    # A head that trains on one class reads the same data.
    linear = "dict(type='LinearClsHead', num_classes=3, in_channels=16)"
    (here / 'one.py').write_text(
        f"_base_ = 'many.py'\nmodel = dict(head=dict(_delete_=True, **{linear}))\n"
    )
    many = 'many.py must be a classifier with one label per image, got one with MultiLabelLinear'
    one = "the images must have one class each, got 2 of '.*2.png'"
    for message, config in ((many, 'many.py'), (one, 'one.py')):
        for kind in ('confusion', 'features'):
            stops(message, main, ['plot', kind, config, str(best), '--out', 'a.png'])
