"""Every config loads, is listed, contains what its name says, and reads its data.

Configs of detection and segmentation are mostly tested in downstream/test_configs.py, and the
models in test_config_models.py.
"""

import ast
import os
import re
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.registry import DATASETS, METRICS
from PIL import Image

from aft_mm.datasets.utterances import frames_needed
from aft_mm.tokenizers import TextUnits

from .all_configs import ROOT, build_model, configs_of, fields, load_config
from .helpers import command, each
from .parallel_data import MISSING, REASON

FOLDERS = sorted(path.parent for path in ROOT.glob('configs/*/metafile.yml'))
DOWNSTREAM = {'detection', 'segmentation'}
TASK = {
    name: folder.name
    for folder in FOLDERS
    if folder.name not in DOWNSTREAM
    for name in configs_of(folder.name)
}
PATHS = configs_of(*dict.fromkeys(TASK.values()))

# The mixer type of each family, and options that are not in the name.
FAMILIES = {
    'deit': dict(type='SoftmaxAttention'),
    'transformer': dict(type='SoftmaxAttention'),
    'image-transformer-local1d': dict(type='LocalSoftmaxAttention', window=256),
    'image-transformer-local2d': dict(type='LocalSoftmaxAttention', window=(16, 16)),
    'sparse-transformer': dict(type='StridedAttention', stride=128, qk_dims=128),
    'linear': dict(type='LinearAttention'),
    'performer': dict(type='PerformerAttention', redraw=1000),
    'reformer': dict(type='LSHAttention', num_rounds=4, num_buckets=64, chunk_size=32),
    'lsh': dict(type='LSHAttention', num_buckets=64, chunk_size=32),
    'synthesizer': dict(type='DenseSynthesizer'),
    'lambda': dict(type='LambdaLayer', key_dims=16),
    'lstm': dict(type='LSTM'),
    'depthwise-conv': dict(type='DepthwiseConv'),
    'pooling': dict(type='Pooling'),
    'token-shift': dict(type='TokenShift'),
    'identity': dict(type='Identity'),
    'aft-simple': dict(type='AFTSimple'),
    'aft-relu': dict(type='AFTSimple', key_function='relu', gate='relu'),
    'aft-relu2': dict(type='AFTSimple', key_function='relu2', gate='relu'),
    'aft-relu-softmax': dict(type='AFTSimple', gate='relu'),
    'aft-full': dict(type='AFTFull'),
    'aft-conv': dict(type='AFTConv', kernel_size=7),
    'aft-conv-signed': dict(type='AFTConvSigned', kernel_size=7),
    'aft-local': dict(type='AFTLocal'),
    'aft-local2d': dict(type='AFTLocal', window=(8, 8)),
    'aft-local-learned': dict(type='AFTLocalLearned', window=256),
    'aft-local-hard': dict(type='AFTLocalHard'),
    'aft-local1d-hard': dict(type='AFTLocalHard', window=256),
    'aft-local2d-hard': dict(type='AFTLocalHard', window=(16, 16)),
}
# The mixers of the blocks.
HYBRIDS = {
    'hybrid-aft-simple-transformer': ['aft-simple', 'transformer'],
    'hybrid-aft-full-transformer': ['aft-full', 'transformer'],
    'hybrid-transformer-aft-simple': ['transformer', 'aft-simple'],
    'hybrid-transformer-aft-full': ['transformer', 'aft-full'],
    'hybrid-token-shift-transformer': ['token-shift', 'transformer'],
    'hybrid-identity-transformer': ['identity', 'transformer'],
    **{
        f'hybrid-depthwise-conv-{last}': ['depthwise-conv', 'depthwise-conv', last]
        for last in ('aft-conv', 'aft-simple', 'deit')
    },
}
CONTROLS = ('depthwise-conv', 'pooling', 'token-shift', 'identity')
# Other options of short sequences.
SMALL = {
    'image-transformer-local1d': dict(type='LocalSoftmaxAttention', window=32),
    'sparse-transformer': dict(type='StridedAttention', stride=16),
    'reformer': dict(type='LSHAttention', num_rounds=4, num_buckets=16, chunk_size=16),
    'aft-local2d': dict(type='AFTLocal', window=(4, 4)),
    'aft-local2d-hard': dict(type='AFTLocalHard', window=(8, 8)),
}
# Options of the third part of a name.
ABLATIONS = {
    'nonfactorised': dict(rank=None),
    'no-query': dict(query=False),
    'naive': dict(reparameterize=False),
    'no-global': dict(global_connectivity=False),
    'entropy': dict(sparsity='entropy'),
    'gumbel': dict(sparsity='gumbel', tau=0.5),
    'peak': dict(init_peak=6),
}
# Meaning of the number after a family.
NUMBER = {'lsh': 'num_rounds'}
# Layers and width that are not in the name.
SIZES = {
    'tiny': (12, 192),
    'small': (12, 384),
    ('image_classification', 'base'): (12, 768),
    ('machine_translation', 'base'): (6, 512),
    ('machine_translation', 'mini'): (2, 128),
    ('copy_task', 'mini'): (4, 64),
    ('image_ar', 'mini'): (4, 128),
    ('language_modeling', 'mini'): (4, 128),
    ('point_cloud', 'mini'): (4, 128),
    ('super_resolution', 'mini'): (4, 128),
    ('synthetic_tasks', 'mini'): (2, 64),
    ('speech_recognition', None): (9, 192),
}
# How the data folder or base file begins if not with the first word of the name.
# Data sets whose test split shows the curve, as they have no other.
WITHOUT_VALIDATION = (
    'fsdd mnist yesno in1k an4 digits modelnet10 cifar10 imagenette cifar10full'.split()
)
DATA_NAMES = {'in1k': 'imagenet', 'imagefolder': 'images'}
SAMPLES = (
    'split',
    'indices',
    'data_root',
    'source_file',
    'transcription',
    'ann_file',
    'data_prefix',
)
ARRAYS = ('aft_mm.CIFAR10Binary', 'aft_mm.Digits', 'aft_mm.Pathfinder')
# Height, width (unless given in the name) and classes.
IMAGES = dict(
    in1k=(224, 1000),
    imagenette=(224, 10),
    cifar10=(32, 10),
    cifar10full=(32, 10),
    digits=(8, 10),
    pathfinder=(32, 2),
)
SEQUENCES = dict(cifar10=(32, 32, 3), mnist=(28, 28, 1))


def names(*tasks, pattern=''):
    return [name for name in PATHS if TASK[name] in tasks and re.search(pattern, name)]


def every_config(test):
    def run(self, task):
        for name in names(task):
            try:
                test(self, name)
            except Exception as error:
                raise AssertionError(f'{name}: {error}') from error

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return pytest.mark.parametrize('task', sorted(set(TASK.values())))(run)


CLASSIFIERS = names('image_classification')
DECODERS = names('image_ar', 'language_modeling')
PAIRS, CLOUDS = names('super_resolution'), names('point_cloud')
SPEECH, TRANSLATION = names('speech_recognition'), names('machine_translation')
COPY = names('copy_task', 'synthetic_tasks')
MINI = [name for name in PATHS if fields(name)['size'] == 'mini']
SPLITS = ('train', 'val', 'test')


def load(name):
    return load_config(PATHS[name])


def build(name):
    return build_model(PATHS[name])


def count(name):
    return sum(parameter.numel() for parameter in build(name).parameters())


def datasets(name):
    return [load(name)[f'{split}_dataloader'].dataset for split in SPLITS]


def main_part(model):
    """Return the part of a model (config or module) whose mixer is in the name."""
    for part in ('backbone', 'decoder', 'encoder'):
        found = model.get(part) if isinstance(model, dict) else getattr(model, part, None)
        if found is not None:
            return found


def as_list(value):
    return value if isinstance(value, list) else [value]


def bases(path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == '_base_':
            return [
                base if '::' in base else (path.parent / base).resolve()
                for base in as_list(ast.literal_eval(node.value))
            ]
    return []


def ancestors(path):
    for base in bases(path):
        if isinstance(base, Path):
            yield base
            yield from ancestors(base)


class TestFiles:
    every_folder = pytest.mark.parametrize('folder', FOLDERS, ids=lambda folder: folder.name)

    def test_every_task_is_in_the_model_index(self):
        tasks = {path.parent for path in ROOT.glob('configs/*/*.py')}
        without_results = {ROOT / 'configs/_base_', ROOT / 'configs/own_data'}
        assert tasks - without_results == set(FOLDERS)
        index = yaml.safe_load((ROOT / 'model-index.yml').read_text())
        assert index['Import'] == [f'configs/{folder.name}/metafile.yml' for folder in FOLDERS]

    @every_folder
    def test_inheritance_is_at_most_three_deep_and_imports_nothing(self, folder):
        def depth(path):
            # A host's file counts as one; tests/downstream checks that it inherits nothing.
            return 1 + max(map(depth, bases(path) if isinstance(path, Path) else []), default=0)

        for path in folder.glob('*.py'):
            assert depth(path) <= 3, path
            assert 'import ' not in path.read_text(), path

    @every_folder
    def test_metafile_lists_every_config_with_its_parameters(self, folder):
        models = yaml.safe_load((folder / 'metafile.yml').read_text())['Models']
        assert {ROOT / model['Config'] for model in models} == set(folder.glob('*.py'))
        for model in models:
            assert Path(model['Config']).stem == model['Name']
            if folder.name not in DOWNSTREAM:  # counted in tests/downstream
                assert model['Metadata']['Parameters'] == count(model['Name']), model['Name']

    @every_folder
    def test_readme_links_every_config(self, folder):
        linked = re.findall(r'\(([\w.-]+)\.py\)', (folder / 'README.md').read_text())
        assert set(linked) == {path.stem for path in folder.glob('*.py')}


class TestNames:
    @every_config
    def test_mixer(self, name):
        if name.startswith(('bi-lstm', 'tdnn', 'conformer')):
            return
        field, task = fields(name), TASK[name]
        if field['family'] in HYBRIDS:
            expected = [FAMILIES[family]['type'] for family in HYBRIDS[field['family']]]
            mixers = [layer.token_mixer for layer in main_part(build(name)).layers]
            assert [type(mixer).__name__ for mixer in mixers] == expected
            heads = {mixer.num_heads for mixer in mixers if hasattr(mixer, 'num_heads')}
            assert field['heads'] is None or heads == {field['heads']}
            if field['kernel'] is None:
                return
            same = [mixer for mixer in mixers if hasattr(mixer, 'kernel_size')]
            assert {mixer.kernel_size[0] for mixer in same} == {field['kernel']}
            return
        mixer = dict(main_part(load(name).model).token_mixer)
        heads, rank = mixer.pop('num_heads', None), mixer.pop('rank', 'no bias')
        expected = dict(name in MINI and SMALL.get(field['family']) or FAMILIES[field['family']])
        expected['type'] = f'aft_mm.{expected["type"]}'
        if field['number'] is not None:
            expected[NUMBER.get(field['family'], 'window')] = field['number']
        if field['kernel']:
            expected['kernel_size'] = field['kernel']
        if task == 'copy_task' and field['family'] == 'lsh':
            expected |= dict(num_buckets=8, chunk_size=8 if name in MINI else 32)
        if task in ('synthetic_tasks', 'image_classification'):
            side = 4 if task == 'synthetic_tasks' else 8
            if field['family'] == 'sparse-transformer':
                expected['stride'] = side
            elif field['family'] == 'reformer':
                expected |= dict(num_buckets=4 if 'mqar' in name else 8, chunk_size=side)
        expected |= ABLATIONS.get(field['what'], {})
        if (field['what'], task) == ('peak', 'image_ar'):
            expected['init_peak'] = 3
        assert expected.pop('rank', rank) == rank
        assert mixer == expected
        # AFT, the controls and the LSTM have no heads, except AFT-conv.
        assert (heads is None) == (
            mixer['type'].startswith('aft_mm.AFT')
            and 'aft-conv' not in field['family']
            or field['family'] in (*CONTROLS, 'lstm')
        )
        assert field['heads'] in (None, heads)
        assert (rank is None) == (field['what'] == 'nonfactorised')
        if type(rank) is int and name not in MINI and task in ('image_ar', 'language_modeling'):
            wide = 128 if field['dims'] == 512 else 64
            assert rank == (256 if 'enwik8' in name else wide)
        built = main_part(build(name)).layers[0].token_mixer
        assert f'aft_mm.{type(built).__name__}' == mixer['type']
        if field['family'] == 'aft-conv':
            dims = 2 if task in ('image_classification', 'image_ar') else 1
            assert built.position_bias().shape == (heads, *dims * (mixer['kernel_size'],))

    @every_config
    def test_size(self, name):
        field, model = fields(name), load(name).model
        if field['family'] == 'bi-lstm':
            assert build(name).encoder.lstm.num_layers == 3
            assert field['heads'] in (None, build(name).encoder.lstm.hidden_size)
            return
        part = main_part(build(name))
        layers, dims = SIZES.get(field['size']) or SIZES.get(
            (TASK[name], field['size']), (field['layers'], field['dims'])
        )
        if name in MINI and TASK[name] in ('image_classification', 'speech_recognition'):
            return  # as large as the others on the same data
        if field['size'] != 'quickstart':
            assert (len(part.layers), part.embed_dims) == (layers, dims)
        if 'encoder' in model and 'decoder' in model:
            assert model.encoder.embed_dims == dims
            pairs = TASK[name] == 'super_resolution'
            assert model.encoder.num_layers == ((2 if name in MINI else 4) if pairs else layers)
        if 'decoder' in model:
            assert model.head.embed_dims == dims

    @every_config
    def test_schedule(self, name):
        field, config = fields(name), load(name)
        assert config.train_dataloader.batch_size == field['batch']
        if field['unit'] == 'e':
            assert config.train_cfg.max_epochs == field['length']
        elif field['unit'] == 'k':
            assert config.train_cfg.max_iters == 1000 * field['length']
        budget = config.default_hooks.get('time_budget')
        if field['unit'] == 'd':
            total = field['gpus'] * field['batch']
            assert budget == dict(type='aft_mm.TimeBudgetHook', days=field['length'])
            # Even at 5 ms per iteration, the time ends before the epochs.
            iterations = config.train_cfg.max_epochs * 50_000 // total
            assert 0.005 * iterations > field['length'] * 24 * 3600
            assert config.param_scheduler == [dict(type='ConstantLR', factor=1.0)]
            saved = config.default_hooks.checkpoint
            assert not saved.by_epoch and saved.interval < 50_000 // total
        else:
            assert budget is None
        if (
            field['gpus'] > 1 and TASK[name] != 'machine_translation'
        ):  # batches are counted in tokens
            assert config.auto_scale_lr.base_batch_size == field['gpus'] * field['batch']

    @every_config
    def test_data(self, name):
        first = fields(name)['data'].split('-')[0]
        expected = DATA_NAMES.get(first, first)
        root = os.environ.get('AFT_MM_DATA', 'data')
        parts = datasets(name)
        for part in parts:
            kind = part.type if '.' in part.type else f'mmpretrain.{part.type}'
            assert DATASETS.get(kind) is not None
            assert not part.get('download', part.type == 'CIFAR10')
            files = [part[key] for key in ('data_root', 'data_file', 'source_file') if key in part]
            if files:
                assert files[0].startswith(f'{root}/')
                found = files[0].removeprefix(f'{root}/').lower()
            else:  # made, or part of a package
                (found,) = [
                    path.stem for path in ancestors(PATHS[name]) if path.parent.name == 'datasets'
                ]
            assert found.replace('_', '').startswith(expected), found
        read = [
            {key: part[key] for key in SAMPLES if key in part} or part.get('test_mode', False)
            for part in parts
        ]
        assert read[0] not in read[1:]
        assert first in WITHOUT_VALIDATION or read[1] != read[2]
        assert 'indices' not in parts[2] or first in ('digits', 'yesno')


class TestData:
    @each('name', CLASSIFIERS)
    def test_images_with_a_class(self, name, tmp_path):
        field, config = fields(name), load(name)
        data, _, size = field['data'].partition('-')
        size, num_classes = int(size.removesuffix('px') or IMAGES[data][0]), IMAGES[data][1]
        channels = config.model.backbone.get('in_channels', 3)
        assert config.model.backbone.img_size == size
        assert config.model.head.num_classes == config.data_preprocessor.num_classes == num_classes
        rng = np.random.default_rng(0)
        for split, dataset in zip(SPLITS, datasets(name), strict=True):
            if field['what'] == 'test-only' and split == 'train':
                size = 224
            sample = dict(gt_label=num_classes - 1)
            if dataset.type == 'ImageNet':
                sample['img_path'] = str(tmp_path / 'image.JPEG')
                image = rng.integers(0, 256, (261, 307, 3), dtype=np.uint8)
                Image.fromarray(image).save(sample['img_path'])
            else:
                assert dataset.type in ARRAYS or (
                    (dataset.type, field['what']) == ('CIFAR10', 'pickle')
                )
                sample['img'] = rng.integers(0, 256, (size, size, channels), dtype=np.uint8)
            packed = Compose(dataset.pipeline)(sample)
            assert packed['inputs'].shape == (channels, size, size)
            assert packed['inputs'].dtype == torch.uint8
            assert packed['data_samples'].gt_label.item() == num_classes - 1
            size = config.model.backbone.img_size

    @pytest.mark.parametrize('name', DECODERS)
    def test_sequences(self, name, tmp_path):
        config, what = load(name), fields(name)['what'] or ''
        data, _, context = fields(name)['data'].partition('-t')
        length = sequence_length(name)
        assert prod(config.model.decoder.grid) == length
        families = 'aft-conv', 'depthwise-conv'
        on_grid = '2d' in name or fields(name)['family'] in families and data == 'mnist'
        assert (len(config.model.decoder.grid) == 2) == on_grid
        pixels = (3,) if what.endswith('pixels') else ()
        rng = np.random.default_rng(0)
        for split, dataset in zip(SPLITS, datasets(name), strict=True):
            if data == 'enwik8':
                assert dataset.context_length == int(context) and dataset.split == split
                path = tmp_path / 'text'
                path.write_bytes(rng.integers(0, 256, 41 * length, np.uint8).tobytes())
                packed = DATASETS.build(dict(dataset, data_file=str(path)))[0]
            else:  # without a validation part
                assert dataset.split == ('train' if split == 'train' else 'test')
                assert config.image_shape == SEQUENCES[data]
                image = rng.integers(0, 256, SEQUENCES[data], dtype=np.uint8)
                packed = Compose(dataset.pipeline)(dict(img=image, gt_label=3))
                if split == 'test':
                    assert torch.equal(
                        packed['inputs'].flatten(), torch.from_numpy(image).flatten()
                    )
            assert packed['inputs'].shape == (length, *pixels)
            assert packed['inputs'].dtype == torch.uint8
            assert packed['data_samples'].length == length
        if data == 'cifar10':  # linear transformers do not augment
            augmented = datasets(name)[0].pipeline[:-1]
            expected = ['mmpretrain.RandomFlip', 'aft_mm.RandomValueShift']
            assert [s.type for s in augmented] == ([] if what.startswith('logistic') else expected)
            assert not augmented or (augmented[0].prob, augmented[1].max_shift) == (0.5, 10)

    @pytest.mark.parametrize('name', PAIRS)
    def test_pairs_of_images(self, name, tmp_path):
        config = load(name)
        small, size = map(int, fields(name)['data'].split('-')[1].split('to'))
        assert config.image_shape == (size, size, 3) and config.source_shape == (small, small, 3)
        assert prod(config.model.decoder.grid) == size**2
        assert config.model.encoder.grid == (small, small)
        image = np.random.default_rng(0).integers(0, 256, (218, 178, 3), np.uint8)
        for number, (split, dataset) in enumerate(zip(SPLITS, datasets(name), strict=True)):
            root = tmp_path / split
            assert dataset.get('test_mode', False) == (split != 'train')
            if dataset.type == 'aft_mm.CelebA':
                assert dataset.split == split
                file = root / 'img_align_celeba/000001.png'
                file.parent.mkdir(parents=True)
                (root / 'list_eval_partition.txt').write_text(f'000001.png {number}\n')
            else:
                assert dataset.data_root.endswith(f'/images/{split}')
                root.mkdir()
                file = root / 'one.png'
            Image.fromarray(image).save(file)
            packed = DATASETS.build(dict(dataset, data_root=str(root)))[0]
            source = packed['data_samples'].source
            assert packed['inputs'].shape == (size**2, 3) and source.shape == (small**2, 3)
            assert packed['inputs'].dtype == source.dtype == torch.uint8
            # A pixel of the source is the mean of the pixels that it covers.
            pixels = packed['inputs'].double().view(small, size // small, small, size // small, 3)
            gap = pixels.mean((1, 3)).flatten(0, 1) - source
            assert gap.abs().max() <= 0.5 + 1e-6
        steps = [step.type for step in datasets(name)[0].pipeline]
        assert ('mmpretrain.RandomFlip' in steps) == (name in MINI)  # of few images
        assert steps[-2:] == ['aft_mm.SuperResolutionPair', 'aft_mm.PackSequence']

    @pytest.mark.parametrize('name', CLOUDS)
    def test_point_clouds(self, name, tmp_path):
        config = load(name)
        points, bits = config.point_cloud.num_points, config.point_cloud.num_bits
        decoder = config.model.decoder
        assert points == (1024 if 'modelnet' in name else 2048)
        assert decoder.grid == (3 * points,) and decoder.tokens_per_position == 3
        assert decoder.embedding.num_kinds == 3
        assert decoder.embedding.vocab_size == config.model.head.num_classes == 2**bits
        cloud = np.random.default_rng(0).normal(size=(points + 7, 3)).astype(np.float32)
        for split, dataset in zip(SPLITS, datasets(name), strict=True):
            assert dataset.get('test_mode', False) == (split != 'train')
            without_val = 'modelnet10' in name and split == 'val'
            assert dataset.split == ('test' if without_val else split)
            kind = fields(name)['data'].split('-')[-1]
            assert dataset.classes in (kind, (kind,))
            folder = tmp_path / 'chair' / dataset.split
            folder.mkdir(parents=True, exist_ok=True)
            np.save(folder / 'one.npy', cloud)
            built = DATASETS.build(dict(dataset, data_root=str(tmp_path), classes=('chair',)))
            np.random.seed(0)
            first, second = built[0], built[0]
            assert first['inputs'].shape == (3 * points,) and first['inputs'].dtype == torch.uint8
            assert torch.equal(first['inputs'], second['inputs']) == (split != 'train')
            # Points that are sorted before they are quantised are in order of z alone.
            triples = first['inputs'].view(-1, 3).tolist()
            assert [z for z, _, _ in triples] == sorted(z for z, _, _ in triples)
            assert (triples == sorted(triples)) == ('modelnet' in name)

    @each('name', SPEECH)
    def test_utterances(self, name):
        config = load(name)
        for split, dataset in zip(SPLITS, datasets(name), strict=True):
            assert dataset.units == config.units
            assert dataset.get('test_mode', False) == (split != 'train')
        metrics = [METRICS.build(metric) for metric in as_list(config.test_evaluator)]
        rates, units = [metric.per for metric in metrics if not metric.prefix], config.units
        free = ['word'] if units.get('level') == 'word' else ['character', 'word']
        assert rates == (['phoneme'] if units.get('lexicon') else free)
        lexicon = [metric.per for metric in metrics if metric.prefix]
        assert lexicon == (free if 'lexicon' in config.model else [])
        data, _, said = fields(name)['data'].partition('-')  # of AN4, which has both
        assert data == 'librispeech' or said in ('', f'{rates[0]}s')
        assert as_list(config.val_evaluator) == as_list(config.test_evaluator)
        assert build(name).head.num_classes == len(TextUnits(**config.units).names)

    @pytest.mark.parametrize('name', TRANSLATION)
    def test_pairs_of_lines(self, name):
        config = load(name)
        _, source, target = fields(name)['data'].split('-')
        for split, data in zip(SPLITS, datasets(name), strict=True):
            assert data.source_file.endswith(f'.{source}') and data.subwords == config.subwords
            assert data.target_file.endswith(f'.{target}')
            assert data.get('test_mode', False) == (split != 'train')
            grids = config.model.encoder.grid, config.model.decoder.grid
            assert grids == ((data.max_length,),) * 2

    @pytest.mark.parametrize(
        'name', [name for name in SPEECH if name.startswith('aft-conv') and name in MINI]
    )
    def test_real_speech(self, name, shared_data, pack, monkeypatch):
        pytest.importorskip('soundfile', reason='soundfile reads the headers of sound')
        packs = dict(fsdd=(200, 250), yesno=(11, 4), an4_mfcc=(518, 78))
        folder = next(folder for folder in packs if folder.split('_')[0] in name)
        sizes = packs[folder]
        pack(folder)
        monkeypatch.setenv('AFT_MM_DATA', str(shared_data))
        config = Config.fromfile(PATHS[name])
        load(name)  # for its scope
        for split, number in zip(('train', 'test'), sizes, strict=True):
            dataset = config[f'{split}_dataloader'].dataset
            # The statistics of speakers would read every file.
            dataset.pipeline = [s for s in dataset.pipeline if s.type != 'aft_mm.NormalizeFeatures']
            data = DATASETS.build(dataset)
            infos = [data.get_data_info(i) for i in range(len(data))]
            assert len(data) == number and not any(1 in info['units'] for info in infos)
            assert data.lengths.max() <= config.model.encoder.grid[0]
            assert all(frames_needed(i['units']) <= i['num_frames'] for i in infos)

    @pytest.mark.skipif(bool(MISSING), reason=REASON)
    def test_real_translations(self, pack, tmp_path):
        folder = pack('multi30k')
        files = [str(folder / f'val.{language}') for language in ('de', 'en')]
        subwords = str(tmp_path / 's.model')
        command('convert subwords')(
            [*files, '--vocab-size', '400', '--no-byte-fallback', '--out', subwords]
        )
        data = DATASETS.build(
            dict(
                type='aft_mm.ParallelText',
                source_file=files[0],
                target_file=files[1],
                max_length=400,
                subwords=subwords,
                test_mode=True,
            )
        )
        assert len(data) == 1014
        for sample in (data[0], data[500], data[1013]):
            assert data.subwords.decode(sample['inputs']) == sample['data_samples'].reference


def sequence_length(name):
    data, _, context = fields(name)['data'].partition('-t')
    if context:
        return int(context)
    shape = SEQUENCES[data]
    return prod(shape[:2] if (fields(name)['what'] or '').endswith('pixels') else shape)
