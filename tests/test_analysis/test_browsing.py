"""Pictures of browse_dataset.py and compare_models.py, compared with the samples."""

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.structures import InstanceData, PixelData
from PIL import Image

from aft_mm.analysis.browse_dataset import draw_instances, draw_segments, draw_text, enlarge
from aft_mm.analysis.networks import build_dataset
from aft_mm.structures import SequenceSample
from aft_mm.tokenizers import encode_points
from aft_mm.visualization import draw_completions, draw_header

from ..errors import stops


class Known(dict):
    __getattr__ = dict.__getitem__


@pytest.fixture
def browse(tool):
    return tool('browse')


def test_boxes_and_masks_have_their_positions():
    image = np.full((60, 80, 3), 100, np.uint8)
    masks = torch.zeros(2, 60, 80, dtype=torch.bool)
    masks[0, 30:50, 20:40] = True
    boxes = torch.tensor([[20.0, 30, 40, 50], [70, 5, 70, 5]])  # the second has no area
    picture = draw_instances(image, boxes, ['a', 'b'], masks)
    changed = (picture != image).any(-1)
    assert changed[30:50, 20:40].all() and not changed[52:, :].any() and not changed[:, :15].any()
    np.testing.assert_array_equal(draw_instances(image, boxes[:0], []), image)
    # The colour of a class does not depend on the other classes of a picture.
    edges = [
        draw_instances(image, boxes[:1], [name], classes=['a', 'b'])[50, 30].tolist()
        for name in 'ab'
    ]
    assert edges == [picture[50, 30].tolist(), [86, 180, 233]]


def test_every_segment_has_a_colour_except_ignored_ones():
    image = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    labels = np.repeat([[0, 0, 1, 9, 255, 255]], 4, axis=0)
    picture = draw_segments(image * 0, labels)
    colours = [tuple(picture[0, column]) for column in range(6)]
    assert colours[0] == colours[1] and len(set(colours)) == 4 and colours[4] == (0, 0, 0)
    np.testing.assert_array_equal(draw_segments(image, labels)[:, 4:], image[:, 4:])

    two = np.array([[0, 2, 255] * 3 + [0] * 61] * 9)
    named = draw_segments(np.zeros((9, 70, 3), np.uint8), two, ['sky', 'bus', 'tree'])
    opaque = {tuple(colour) for colour in named[9:].reshape(-1, 3).tolist()}
    assert {(230, 159, 0), (0, 158, 115)} <= opaque and (86, 180, 233) not in opaque
    assert (named[9:] < 50).all(-1).any(1).sum() > 10 and named.shape[1] == 70


def test_text_is_wrapped_and_cut_off():
    short, long = draw_text('aft ' * 3), draw_text('aft ' * 2000)
    assert short.shape[1:] == long.shape[1:] and short.shape[0] < long.shape[0]
    lines = long.min((1, 2)) < 128
    assert (short.min((1, 2)) < 128).sum() < 15 < lines.sum()
    assert long[-1].min() == 255


def test_small_images_are_enlarged_by_a_whole_factor():
    image = np.random.default_rng(0).integers(0, 256, (28, 20, 3), dtype=np.uint8)
    large = enlarge(image)
    assert large.shape == (168, 120, 3)
    np.testing.assert_array_equal(large[::6, ::6], image)
    assert enlarge(large).shape == large.shape


def test_pictures_of_every_kind_of_sample(browse):
    rng = np.random.default_rng(0)
    image = torch.from_numpy(rng.integers(0, 256, (3, 200, 160), dtype=np.uint8))
    config = Config(dict(data_preprocessor=dict(bgr_to_rgb=True)))
    rgb = image.numpy()[::-1].transpose(1, 2, 0)

    classes = Known(metainfo=dict(classes=('a', 'b')))

    boxes = InstanceData(bboxes=torch.tensor([[5.0, 5, 90, 80]]), labels=torch.tensor([1]))
    sample = dict(inputs=image, data_samples=Known(gt_instances=boxes))
    picture, title = browse.picture_of(config, classes, sample)
    assert title == 'objects: 1' and (picture != rgb).any(-1).mean() < 0.2

    labels = torch.full((1, 200, 160), 255)
    labels[:, :50] = 1
    sample = dict(inputs=image, data_samples=Known(gt_sem_seg=PixelData(data=labels)))
    picture, title = browse.picture_of(config, classes, sample)
    assert title == '1 class' and len(picture) > 200
    np.testing.assert_array_equal(picture[50:200], rgb[50:])
    pair = SequenceSample(metainfo=dict(length=12, num_context=0))
    pair.source = torch.arange(3).view(1, 3)
    shapes = Config(dict(image_shape=(2, 2, 3), source_shape=(1, 1, 3)))
    sample = dict(inputs=torch.arange(12).view(4, 3), data_samples=pair)
    picture, _ = browse.picture_of(shapes, None, sample)
    assert picture[20:].reshape(160, -1, 3)[0, 0].tolist() == [0, 1, 2]
    assert picture[-1, -1].tolist() == [9, 10, 11]

    cloud = torch.from_numpy(encode_points(rng.standard_normal((20, 3))))
    plain = SequenceSample(metainfo=dict(length=60, num_context=0))
    bits = Config(dict(point_cloud=dict(num_bits=8)))
    picture, title = browse.picture_of(bits, None, dict(inputs=cloud, data_samples=plain))
    assert title == '20 points' and picture.std() > 5

    class TextFile:
        """Tokens are bytes."""

    given = SequenceSample(metainfo=dict(length=3, num_context=1))
    tokens = torch.tensor(list('añ'.encode()), dtype=torch.uint8)
    sample = dict(inputs=tokens, data_samples=given)
    picture, title = browse.picture_of(Config({}), TextFile(), sample)
    np.testing.assert_array_equal(picture, draw_text('a | ñ'))
    numbers, _ = browse.picture_of(Config({}), None, sample)
    np.testing.assert_array_equal(numbers, draw_text('97 | 195 177'))

    class Pairs:
        """Tokens are those of a vocabulary."""

        class subwords:  # noqa: N801
            decode = staticmethod(lambda tokens: ' '.join('abc'[token] for token in tokens))

    pair = SequenceSample(metainfo=dict(length=2, num_context=0), source=torch.tensor([2]))
    sample = dict(inputs=torch.tensor([0, 1]), data_samples=pair)
    picture, title = browse.picture_of(Config({}), Pairs(), sample)
    np.testing.assert_array_equal(picture, draw_text('c\n→ a b'))

    frames = torch.arange(12.0).view(4, 3)
    picture, title = browse.picture_of(Config({}), None, dict(inputs=frames, data_samples=plain))
    assert title == '4 frames' and picture.shape == (120, 160, 3)
    lightness = picture[::40, ::40].sum(-1, dtype=int)
    assert (np.argsort(lightness[::-1].T.ravel()) == np.arange(12)).all()

    with pytest.raises(ValueError, match='must be images, text, point clouds or speech features'):
        browse.picture_of(Config({}), None, dict(inputs=torch.zeros(4, 2, 2), data_samples=given))


def test_annotations_are_resized_with_their_image(browse):
    steps = ['LoadImageFromFile', 'Resize', 'mmdet.LoadAnnotations', 'PackDetInputs']
    dataset = dict(pipeline=[dict(type=name) for name in steps])
    config = Config(dict(val_dataloader=dict(dataset=dataset)))
    browse.load_annotations_first(config, 'val')
    found = [step.type for step in config.val_dataloader.dataset.pipeline]
    assert found == [steps[i] for i in (0, 2, 1, 3)]


def test_a_dataset_is_browsed(browse, digits_classifier, tmp_path, capsys):
    words = f'--split test --num 4 --out {tmp_path}/b.png --dpi 40'.split()
    browse.main([digits_classifier[0], *words])
    assert 'plotted 4 of 65 samples' in capsys.readouterr().out
    assert np.asarray(Image.open(tmp_path / 'b.png')).std() > 5
    config = Config.fromfile(digits_classifier[0])
    dataset = build_dataset(config)
    picture, title = browse.picture_of(config, dataset, dataset[3])
    assert title == str(int(dataset[3]['data_samples'].gt_label))
    np.testing.assert_array_equal(picture[::20, ::20, 0], dataset[3]['inputs'][0])


def test_a_header_stays_in_its_columns():
    name = 'a name of 24 characters'
    np.testing.assert_array_equal(draw_header([name, 'b'], 240)[:, :120], draw_header([name], 120))


def test_models_are_compared_on_their_test_images(tool, untrained, tmp_path, capsys, monkeypatch):
    compare = tool('analysis_tools/compare_models')
    config, checkpoint = untrained['tiny_pixels']
    calls = []
    monkeypatch.setattr(
        compare,
        'draw_completions',
        lambda *args, **kw: calls.append(args) or draw_completions(*args, **kw),
    )
    out = ['--out', str(tmp_path / 'c.png')]
    first, second = (['--model', name, config, checkpoint] for name in 'ab')
    compare.main([*first, *second, '--num', '2', '--keep', '0.25', *out])
    assert '2 models on 2 images' in capsys.readouterr().out
    ((images, completions, rows),) = calls
    assert completions.shape[:2] == (2, 2) and rows == images.shape[1] // 4
    np.testing.assert_array_equal(completions[:, 0], completions[:, 1])  # one model, one seed
    np.testing.assert_array_equal(completions[:, 0, :rows], images[:, :rows])
    for words, message in (
        (
            [*second, '--model', 'a', *untrained['tiny_super_resolution']],
            'must have the same image',
        ),
        ([*second, *second], "--model must have unique names, got 'b'"),
        (['--model', 'b', *untrained['tiny_text']], 'must be the config of an image model with im'),
    ):
        stops(message, compare.main, [*words, *out])
