"""`aft_mm new coco|voc|masks --start`: a detector or segmentor on a trained backbone."""

import itertools
import re
from pathlib import Path

import pytest
import timm
import torch

from aft_mm.analysis.model_complexity import analyse
from aft_mm.cli.main import main
from aft_mm.config.reading import read_config
from aft_mm.convert import starts
from aft_mm.convert.starts import finest_stride
from aft_mm.models import AFTViT, SimpleFeaturePyramid

from .errors import stops
from .helpers import nightly
from .test_own_data_boxes import XML, coco, save
from .test_own_data_masks import save as save_masks

pytestmark = pytest.mark.usefixtures('here')
FEW = {
    'coco': ['train_cfg.max_epochs=1', 'train_cfg.val_interval=1'],
    'voc': ['train_cfg.max_epochs=1', 'train_cfg.val_interval=1'],
    'masks': ['train_cfg.max_iters=2', 'train_cfg.val_interval=2'],
}


def write_data(kind, here):
    names = [f'{number}.jpg' for number in range(10)]
    if kind == 'masks':
        save_masks('data/images/{}.jpg', 'data/masks/{}.png', number=10)
    else:
        for name in names:
            save(here / 'data/JPEGImages' / name)
    if kind == 'coco':
        coco(here / 'data/boxes.json', [f'JPEGImages/{name}' for name in names])
    for number, name in enumerate(names if kind == 'voc' else []):
        path = here / f'data/Annotations/{number}.xml'
        path.parent.mkdir(exist_ok=True)
        path.write_text(XML.format(name=name, label=('cat', 'dog')[number % 2]))


def write_start(patch=14, side=3, size=64):
    """Convert a transformer of two layers with `side` x `side` patches; return its state dict."""
    torch.manual_seed(0)
    model = timm.create_model(
        'deit_tiny_patch16_224', depth=2, img_size=side * patch, patch_size=patch, num_classes=0
    )
    torch.save(model.state_dict(), 'theirs.pth')
    main(['convert', 'vit', 'theirs.pth', 'start.pth', '--size', str(size)])
    return torch.load('start.pth', weights_only=True)


@pytest.mark.parametrize('kind', nightly(FEW, ['voc', 'masks']))
def test_the_weights_arrive_and_the_rest_learns(kind, here):
    pytest.importorskip('mmseg' if kind == 'masks' else 'mmdet')
    write_data(kind, here)
    start = write_start()['state_dict']
    main(['new', kind, 'data', '--start', 'start.pth'])
    main(['train', 'data.py', '--work-dir', 'work', '--cfg-options', *FEW[kind]])
    (path,) = Path('work').glob('best_*.pth')
    state = torch.load(path, weights_only=True)['state_dict']
    assert {name for name in state if name.startswith('backbone.')} == start.keys()
    for name, tensor in start.items():
        assert torch.equal(state[name], tensor), name
    assert state['neck.levels.0.4.bias'].count_nonzero()  # it began with 0

    # A detector or segmentor is a start as well; its backbone is that of its own start.
    main(['new', kind, 'data', '--out', 'again.py', '--start', str(path)])
    again = read_config('again.py').model
    assert again.backbone.init_cfg.checkpoint == str(path.resolve())
    assert again.data_preprocessor == read_config('data.py').model.data_preprocessor
    pictures = 'data/images' if kind == 'masks' else 'data/JPEGImages'
    main(['predict', 'data.py', str(path), pictures, '--out', 'out'])
    assert len(list(Path('out/pictures').rglob('*.*'))) == 10


def test_levels_of_any_patch():
    for patch in (1, 2, 4, 7, 8, 11, 12, 14, 16, 20, 28, 32):
        finest = finest_stride(patch)
        assert 6 <= finest < 12 or finest == patch and patch % 2, patch
        neck = SimpleFeaturePyramid(
            32, 4, in_stride=patch, strides=[finest, 2 * finest, 4 * finest]
        )
        size = 4 * finest * patch
        maps = neck((torch.zeros(1, 32, size // patch, size // patch),))
        assert [x.shape[-1] for x in maps] == [size // finest // n for n in (1, 2, 4)]
    assert finest_stride(15) == 15


def test_starts_that_boxes_and_masks_refuse(here):
    write_data('coco', here)
    checkpoint = write_start()
    config = checkpoint['meta']['cfg'].replace('in_channels=3', 'in_channels=1')
    torch.save(checkpoint | dict(meta=dict(cfg=config)), 'grey.pth')
    message = r"aft_mm\.AFTViT for 3 channels, got 'grey\.pth'"
    stops(message, main, ['new', 'coco', 'data', '--start', 'grey.pth'])
    stops('--start is for images', main, ['new', 'text', 'data', '--start', 'start.pth'])
    assert not Path('data.py').exists()


def test_channels_are_in_the_order_of_the_start(here):
    checkpoint = write_start()
    config = checkpoint['meta']['cfg']
    assert 'to_rgb=True' in config
    checkpoint['meta']['cfg'] = config.replace('to_rgb=True', 'to_rgb=False')
    torch.save(checkpoint, 'bgr.pth')
    write_data('coco', here)
    for label, name in itertools.product('ab', ('0.jpg', '1.jpg', '2.jpg')):
        save(here / 'photos' / label / name)
    for start, is_rgb in (('start.pth', True), ('bgr.pth', False)):
        main(['new', 'image-folder', 'photos', '--out', f'p_{start[:3]}.py', '--start', start])
        assert read_config(f'p_{start[:3]}.py').data_preprocessor.to_rgb is is_rgb
        main(['new', 'coco', 'data', '--out', f'b_{start[:3]}.py', '--start', start])
        text = Path(f'b_{start[:3]}.py').read_text()
        assert f"'bgr_to_rgb': {is_rgb}" in text


@pytest.mark.parametrize('patch', [8, 16])
@pytest.mark.parametrize(
    'kind, shape',
    [
        ('image-folder', (96, 96)),
        ('image-folder', (192, 192)),
        ('coco', (288, 384)),
        ('masks', (256, 256)),
    ],
)
def test_the_minutes_are_those_of_the_backbone(kind, shape, patch, here, monkeypatch, capsys):
    """Multiply-adds that the printed minutes mean, and those that the analysis counts."""
    if kind == 'image-folder':
        for label, number in itertools.product('abc', range(10)):
            save(here / f'data/{label}/{number}.jpg')
    else:
        write_data(kind, here)
    write_start(patch, size=shape[0])
    monkeypatch.setattr(starts, 'SPEED', 1e6)
    main(['new', kind, 'data', '--start', 'start.pth'])
    words = r'(\d+) iterations?, about (\d+) min on one CPU thread'
    iterations, minutes = map(int, re.search(words, capsys.readouterr().out).groups())
    images = 2 * 27 + 3 if kind == 'image-folder' else 4 * iterations
    mixer = dict(type='aft_mm.SoftmaxAttention', num_heads=3)
    arch = dict(embed_dims=192, num_layers=2)
    network = AFTViT(arch, img_size=shape, patch_size=patch, token_mixer=mixer, with_cls_token=True)
    counted = analyse(network, (3, *shape))['flops']
    assert 60e6 * minutes / images == pytest.approx(counted, rel=0.15)
