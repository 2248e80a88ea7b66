"""The examples of docs/tasks/ and docs/other_data.md do what the text says; their commands run in test_wheel.py."""

from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DATASETS, MODELS, init_default_scope
from PIL import Image
from scipy.spatial import cKDTree

from aft_mm.analysis.run_logs import read_scalars
from aft_mm.cli.main import main
from aft_mm.models import AFTViT

from .documents import ROOT, blocks
from .helpers import WITHOUT_WORKERS, save_picture

GUIDES = sorted(path.stem for path in (ROOT / 'docs/tasks').glob('*.md'))


def python_blocks(guide):
    return blocks(f'docs/tasks/{guide}.md', 'python')


SPLITS = ('train', 'val', 'test')


@pytest.fixture
def guide(here):
    """Return a function that loads a config of a guide and builds its model, in a new folder."""

    def load_example(name, number):
        Path('example.py').write_text(python_blocks(name)[number])
        config = Config.fromfile('example.py')
        init_default_scope(config.default_scope)
        with torch.device('meta'):
            return config, MODELS.build(config.model)

    return load_example


def save_images(folder, splits, image):
    for split in splits:
        save_picture(f'{folder}/{split}/a.png', image)


def first_samples(config):
    return [DATASETS.build(config[f'{split}_dataloader'].dataset)[0] for split in SPLITS]


def test_guide_for_own_images(guide, tmp_path, monkeypatch):
    (tmp_path / 'faces.py').write_text(python_blocks('image_ar')[1])
    monkeypatch.syspath_prepend(tmp_path)
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    save_images('data/faces', ('train', 'test'), image)
    config, model = guide('image_ar', 2)
    for sample in first_samples(config):
        assert torch.equal(sample['inputs'], torch.from_numpy(image).flatten())
        assert model.decoder.max_length == len(sample['inputs'])


def test_guide_for_another_text(guide):
    Path('data').mkdir()
    Path('data/novels.txt').write_bytes(bytes(range(256)) * 24)
    config, _ = guide('language_modeling', 1)
    assert [len(sample['inputs']) for sample in first_samples(config)] == [256] * 3


def test_guide_for_photographs(guide):
    image = np.random.default_rng(0).integers(0, 256, (41, 63, 3), dtype=np.uint8)
    save_images('data/photos', SPLITS, image)
    config, _ = guide('super_resolution', 1)
    windows = np.lib.stride_tricks.sliding_window_view(image, (32, 32, 3)).reshape(-1, 1024, 3)
    for split, sample in zip(SPLITS, first_samples(config), strict=True):
        tokens = sample['inputs'].numpy()
        # A crop of the image at full resolution.
        assert (windows == tokens).all((1, 2)).sum() == 1
        if split != 'train':
            assert (tokens.reshape(32, 32, 3) == image[4:36, 15:47]).all()


def test_guide_for_decoding_points(here):
    folder = here / 'data/ModelNet10.PC15k/chair/test'
    folder.mkdir(parents=True)
    shape = np.random.default_rng(0).normal(size=(1024, 3)) * (1, 3, 2) - 1e6
    np.save(folder / 'a.npy', shape)
    names = {}
    exec(python_blocks('point_cloud')[1], names)
    points, side = names['points'], np.ptp(shape, axis=0).max()
    assert points.shape == (1024, 3) and names['box'][1] == pytest.approx(side)
    # Points differ by at most half a quantisation step along each axis.
    for one, two in ((points, shape), (shape, points)):
        assert cKDTree(one).query(two, p=np.inf)[0].max() <= side / 512 * 1.001


def test_guide_for_own_shapes(guide):
    shape = np.random.default_rng(0).normal(size=(700, 3)).astype(np.float32)
    for split in SPLITS:
        Path('data/my-shapes/vase', split).mkdir(parents=True)
        np.save(f'data/my-shapes/vase/{split}/a.npy', shape)
    config, model = guide('point_cloud', 2)
    for split, first, again in zip(
        SPLITS, first_samples(config), first_samples(config), strict=True
    ):
        assert torch.equal(first['inputs'], again['inputs']) == (split != 'train')
        assert model.decoder.max_length == len(first['inputs'])


def test_guide_for_own_languages(guide):
    config, model = guide('machine_translation', 1)
    for split in SPLITS:
        data = config[f'{split}_dataloader'].dataset
        assert data.source_file == f'data/mine/{split}.fr'
        assert data.subwords == config.subwords == 'data/mine/subwords.model'
    assert model.head.num_values == 8000


def train_an_epoch(tool, config, batch_size):
    words = f'{config} --work-dir work --cfg-options train_cfg.max_epochs=1 param_scheduler=None'
    words += ' default_hooks.logger.interval=1'
    batches = (f'{part}_dataloader.batch_size={batch_size}' for part in ('train', 'val'))
    tool('train').main([*words.split(), *batches, *WITHOUT_WORKERS])


def test_the_own_config_of_the_docs_trains(tool, here):
    examples = blocks('docs/configs.md', 'python')
    (example,) = [block for block in examples if block.startswith('_base_ = [')]
    for split in ('train', 'val'):
        for number in range(1000):
            (here / f'data/imagenet/{split}/n{number:08}').mkdir(parents=True)
        for number in (1, 998):
            image = Image.new('RGB', (260, 240))
            image.save(here / f'data/imagenet/{split}/n{number:08}/a.JPEG')
    (here / 'mine.py').write_text(example)
    train_an_epoch(tool, 'mine.py', batch_size=2)
    config = Config.fromfile('work/mine.py')
    model = MODELS.build(config.model)
    groups = build_optim_wrapper(model, config.optim_wrapper).optimizer.param_groups
    decay = {id(group['params'][0]): group['weight_decay'] for group in groups}
    biases = [value for name, value in model.named_parameters() if 'pos_bias' in name]
    assert biases and all(decay[id(bias)] == 0 for bias in biases)


def test_the_config_for_own_images_trains(tool, here):
    examples = blocks('docs/configs.md', 'python')
    mine, photos = [block for block in examples if block.startswith('_base_ ')]
    Path('mine.py').write_text(mine)
    Path('photos.py').write_text(photos)
    noise = np.random.default_rng(0).integers(0, 256, (99, 70, 3), dtype=np.uint8)
    for name in ('cat', 'dog', 'owl'):
        for split in ('train', 'val'):
            save_images(f'photos/{split}', [name], noise)
    train_an_epoch(tool, 'photos.py', batch_size=3)
    first, last = read_scalars('work')
    assert first['loss'] < 2 and 'accuracy/top1' in last


def test_guide_for_own_speech(guide):
    soundfile = pytest.importorskip('soundfile', reason='soundfile writes the sound of this test')
    Path('data/my-speech').mkdir(parents=True)
    noise = np.random.default_rng(0).standard_normal(8000) / 9
    for name in ('train', 'test'):
        soundfile.write(f'data/my-speech/{name}-1.wav', noise, 16000)
        Path(f'data/my-speech/{name}.txt').write_text(f"{name}-1 That's it\n")
    config, _ = guide('speech_recognition', 1)
    model = MODELS.build(config.model)
    for sample in first_samples(config):
        assert sample['inputs'].shape == (16, 120) and 1 not in sample['data_samples'].units
    batch = model.data_preprocessor({key: [value] for key, value in sample.items()}, False)
    assert model(**batch, mode='loss')['loss'].isfinite()
    assert model.encoder.max_length == 800


def other_data(index):
    return blocks('docs/other_data.md', 'python')[index]


def validations(config, epochs):
    """Train with batches of 20; return the scalars of the validations, one after each epoch."""
    options = (
        f'train_dataloader.batch_size=20 train_cfg.val_interval=1 train_cfg.max_epochs={epochs}'
    )
    words = ['--work-dir', 'work', '--cfg-options', *options.split(), *WITHOUT_WORKERS]
    main(['train', config, *words])
    return [scalars for scalars in read_scalars('work') if 'loss' not in scalars]


def test_several_labels_per_image_are_learned(here):
    rng = np.random.default_rng(0)
    lines = ['file,tags']
    for index in range(100):
        shown = rng.integers(0, 2, 3, dtype=np.uint8)
        save_picture(f'tagged/images/{index}.png', np.full((64, 64, 3), 200 * shown))
        tags = [tag for tag, there in zip(('red', 'green', 'blue'), shown, strict=True) if there]
        lines.append(f'{index}.png,{";".join(tags)}')
    Path('tagged/labels.csv').write_text('\n'.join(lines))
    exec(other_data(0), {})
    Path('tagged.py').write_text(other_data(1))
    last = validations('tagged.py', 5)[-1]
    assert min(last[f'multi-label/{name}'] for name in ('mAP', 'precision', 'recall')) > 95


def test_a_rare_class_is_found(here):
    """Without its weight, no image of it is found in these epochs."""
    rng = np.random.default_rng(0)
    for name, number in dict(bad=8, ok=90).items():
        for index in range(number):
            image = rng.integers(0, 200, (64, 64, 3))
            image[16:48, 16:48] += 55 * (name == 'bad')
            save_picture(f'photos/{name}/{index}.png', image)
    main(['new', 'image-folder', 'photos'])
    Path('rare.py').write_text(other_data(2))
    recalls = [found['single-label/recall'] for found in validations('rare.py', 9)]
    assert len(recalls) < 9 and max(recalls) == 100


def test_windows_of_sensors_are_learned():
    def sample(number):
        labels = torch.randint(2, (number,))
        windows = [torch.randn(int(length), 6) for length in torch.randint(20, 61, (number,))]
        for window, label in zip(windows, labels, strict=True):
            window[:, 0] += 2 * label * torch.sin(torch.arange(len(window)) * 0.8)
        return dict(windows=windows, labels=labels)

    names = sample(300)
    exec(other_data(3), names)
    model, (windows, labels) = names['model'].eval(), sample(200).values()
    with torch.no_grad():
        scores = model(windows)
        assert (scores.argmax(1) == labels).float().mean() > 0.95
        for index in range(3):
            assert torch.allclose(scores[index], model(windows[index : index + 1])[0], atol=1e-4)


def test_a_number_per_image_is_learned(here):
    mixer = dict(type='aft_mm.SoftmaxAttention', num_heads=6)
    vit = AFTViT('small', 224, 14, token_mixer=mixer, with_cls_token=True)
    state = {f'backbone.{name}': value for name, value in vit.state_dict().items()}
    torch.save(dict(state_dict=state), 'vit.pth')
    lines = ['file,y']
    for index in range(20):
        save_picture(f'measured/images/{index}.png', np.full((20, 30, 3), 40 + 10 * index))
        lines.append(f'{index}.png,{index / 3:.2f}')
    Path('measured/targets.csv').write_text('\n'.join(lines))
    names = {}
    exec(other_data(4), names)
    assert names['error'] < 0.2 * (names['mean'] - names['y'])[~names['train']].abs().mean()
