"""Every config loads, builds, trains if it is small, and contains what its name says.

Those of detection and segmentation are in downstream/test_configs.py, but for their files and
tables.
"""

import ast
import logging
import math
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
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DATASETS, HOOKS, METRICS, MODELS, PARAM_SCHEDULERS, RUNNERS
from PIL import Image

from aft_mm.datasets.utterances import frames_needed
from aft_mm.structures import SequenceSample
from aft_mm.tokenizers import TextUnits

from .all_configs import ROOT, build_model, configs_of, fields, load_config, model_settings
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

# The mixer of each family: its type, and options that the name does not give.
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
    'aft-simple': dict(type='AFTSimple'),
    'aft-relu': dict(type='AFTSimple', key_function='relu', gate='relu'),
    'aft-relu2': dict(type='AFTSimple', key_function='relu2', gate='relu'),
    'aft-relu-softmax': dict(type='AFTSimple', gate='relu'),
    'aft-full': dict(type='AFTFull'),
    'aft-conv': dict(type='AFTConv', kernel_size=7),
    'aft-local': dict(type='AFTLocal'),
    'aft-local2d': dict(type='AFTLocal', window=(8, 8)),
    'aft-local-learned': dict(type='AFTLocalLearned', window=256),
    'aft-local-hard': dict(type='AFTLocalHard'),
    'aft-local1d-hard': dict(type='AFTLocalHard', window=256),
    'aft-local2d-hard': dict(type='AFTLocalHard', window=(16, 16)),
}
# Other options of short sequences.
SMALL = {
    'image-transformer-local1d': dict(type='LocalSoftmaxAttention', window=32),
    'sparse-transformer': dict(type='StridedAttention', stride=16),
    'reformer': dict(type='LSHAttention', num_rounds=4, num_buckets=16, chunk_size=16),
    'aft-local2d': dict(type='AFTLocal', window=(4, 4)),
    'aft-local2d-hard': dict(type='AFTLocalHard', window=(8, 8)),
}
# Options that the third part of a name stands for.
ABLATIONS = {
    'nonfactorised': dict(rank=None),
    'no-query': dict(query=False),
    'naive': dict(reparameterize=False),
    'no-global': dict(global_connectivity=False),
    'entropy': dict(sparsity='entropy'),
    'gumbel': dict(sparsity='gumbel', tau=0.5),
}
# The number behind a family.
NUMBER = {'lsh': 'num_rounds'}
# Layers and width where the name does not give them.
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
    ('speech_recognition', None): (9, 192),
}
# How the folder of a data set, or the file in configs/_base_/datasets, begins if it is not with the
# first word of the name.
DATA_NAMES = {'in1k': 'imagenet', 'imagefolder': 'images'}
# The options of a data set that decide which samples it has.
SAMPLES = ('split', 'data_root', 'source_file', 'transcription', 'ann_file', 'data_prefix')
# Height and width, unless the name says another one, and classes.
IMAGES = dict(in1k=(224, 1000), imagenette=(224, 10), cifar10=(32, 10), digits=(8, 10))
SEQUENCES = dict(cifar10=(32, 32, 3), mnist=(28, 28, 1))


def names(*tasks, pattern=''):
    return [name for name in PATHS if TASK[name] in tasks and re.search(pattern, name)]


every_config = pytest.mark.parametrize('name', PATHS)
CLASSIFIERS = names('image_classification')
DECODERS = names('image_ar', 'language_modeling')
PAIRS, CLOUDS = names('super_resolution'), names('point_cloud')
SPEECH, TRANSLATION = names('speech_recognition'), names('machine_translation')
COPY = names('copy_task')
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
    """The part of a model whose mixer its name is about, a config or a module."""
    for part in ('backbone', 'decoder', 'encoder'):
        found = model.get(part) if isinstance(model, dict) else getattr(model, part, None)
        if found is not None:
            return found


def as_list(value):
    return value if isinstance(value, list) else [value]


def bases(path):
    """The files in ``_base_`` of a config; those of a host package as text."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == '_base_':
            return [
                base if '::' in base else (path.parent / base).resolve()
                for base in as_list(ast.literal_eval(node.value))
            ]
    return []


def ancestors(path):
    """The files of this project that a config inherits, directly or not."""
    for base in bases(path):
        if isinstance(base, Path):
            yield base
            yield from ancestors(base)


class TestFiles:
    """The folders of configs/ with their metafiles and READMEs, of every task."""

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
    """The parts of a name, one after the other."""

    @pytest.mark.parametrize('name', [name for name in PATHS if not name.startswith('bi-lstm')])
    def test_mixer(self, name):
        field, task = fields(name), TASK[name]
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
        expected |= ABLATIONS.get(field['what'], {})
        assert expected.pop('rank', rank) == rank
        assert mixer == expected
        # AFT has no heads, with the exception of AFT-conv, and a rank where it has a free bias.
        assert (heads is None) == (
            mixer['type'].startswith('aft_mm.AFT') and field['family'] != 'aft-conv'
        )
        assert field['heads'] in (None, heads)
        assert (rank is None) == (field['what'] == 'nonfactorised')
        if type(rank) is int and name not in MINI and task in ('image_ar', 'language_modeling'):
            wide = 128 if field['dims'] == 512 else 64
            assert rank == (256 if 'enwik8' in name else wide)
        built = main_part(build(name)).layers[0].token_mixer
        assert f'aft_mm.{type(built).__name__}' == mixer['type']
        if field['family'] == 'aft-conv':
            dims = 2 if task == 'image_classification' else 1
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
            return  # as large as the others on the same data, see TestSizes
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
        if field['gpus'] > 1 and TASK[name] != 'machine_translation':  # whose batches are tokens
            assert config.auto_scale_lr.base_batch_size == field['gpus'] * field['batch']

    @every_config
    def test_data(self, name):
        """The folder, or the base, begins as the name of the data; parts of it are apart."""
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
        assert 'indices' not in parts[2] or first == 'digits'


class TestData:
    """What the datasets and pipelines give is what the model takes."""

    @pytest.mark.parametrize('name', CLASSIFIERS)
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
            sample = dict(gt_label=3)
            if dataset.type == 'ImageNet':
                sample['img_path'] = str(tmp_path / 'image.JPEG')
                image = rng.integers(0, 256, (261, 307, 3), dtype=np.uint8)
                Image.fromarray(image).save(sample['img_path'])
            else:
                assert dataset.type in ('aft_mm.CIFAR10Binary', 'aft_mm.Digits') or (
                    (dataset.type, field['what']) == ('CIFAR10', 'pickle')
                )
                sample['img'] = rng.integers(0, 256, (size, size, channels), dtype=np.uint8)
            packed = Compose(dataset.pipeline)(sample)
            assert packed['inputs'].shape == (channels, size, size)
            assert packed['inputs'].dtype == torch.uint8
            assert packed['data_samples'].gt_label.item() == 3
            size = config.model.backbone.img_size

    @pytest.mark.parametrize('name', DECODERS)
    def test_sequences(self, name, tmp_path):
        config, what = load(name), fields(name)['what'] or ''
        data, _, context = fields(name)['data'].partition('-t')
        length = sequence_length(name)
        assert prod(config.model.decoder.grid) == length
        assert (len(config.model.decoder.grid) == 2) == ('2d' in name)
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
        if data == 'cifar10':  # the protocol of linear transformers does not augment
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

    @pytest.mark.parametrize('name', SPEECH)
    def test_utterances(self, name):
        config = load(name)
        for split, dataset in zip(SPLITS, datasets(name), strict=True):
            assert dataset.units == config.units
            assert dataset.get('test_mode', False) == (split != 'train')
        rates = [METRICS.build(metric).per for metric in as_list(config.test_evaluator)]
        assert rates == (['phoneme'] if config.units.get('lexicon') else ['character', 'word'])
        said = fields(name)['data'].partition('-')[2]  # of AN4, which has both
        assert said in ('', f'{rates[0]}s')
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
    def test_real_speech(self, name, shared_data, monkeypatch):
        """No utterance of the packs is left out."""
        pytest.importorskip('soundfile', reason='soundfile reads the headers of sound')
        folder, sizes = ('fsdd', (200, 250)) if 'fsdd' in name else ('an4_mfcc', (518, 78))
        if not (shared_data / folder).is_dir():
            pytest.skip(f'the pack {folder} is not at {shared_data}')
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
    def test_real_translations(self, shared_data, tmp_path):
        """All lines of the pack are read, and of its test set no character is lost."""
        if not (shared_data / 'multi30k').is_dir():
            pytest.skip(f'the pack multi30k is not at {shared_data}')
        from .parallel_data import converter

        files = [str(shared_data / f'multi30k/val.{language}') for language in ('de', 'en')]
        subwords = str(tmp_path / 's.model')
        converter('subwords').main([*files, '--vocab-size', '400', '--out', subwords])
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
    """Tokens of a decoder, by its name."""
    data, _, context = fields(name)['data'].partition('-t')
    if context:
        return int(context)
    shape = SEQUENCES[data]
    return prod(shape[:2] if (fields(name)['what'] or '').endswith('pixels') else shape)


class TestTraining:
    """Optimizer, hooks and metrics, and a step of the small models."""

    @every_config
    def test_only_matrices_of_layers_are_decayed(self, name):
        model, config = build(name), load(name)
        groups = build_optim_wrapper(model, config.optim_wrapper).optimizer.param_groups
        decayed = {id(p): group['weight_decay'] for group in groups for p in group['params']}
        assert len(decayed) == len(list(model.parameters()))
        decay = config.optim_wrapper.optimizer.get('weight_decay', 0.0)
        # The linear layer that pixels or features go through is one, though it is an embedding.
        tables = 'pos_bias|pos_embed|cls_token|position_embedding|embedding(?!.*projection.weight)'
        for key, parameter in model.named_parameters():
            spared = parameter.ndim == 1 or re.search(tables, key)
            assert decayed[id(parameter)] == (0.0 if spared else decay), key

    @every_config
    def test_optimizer(self, name):
        field, config = fields(name), load(name)
        optimizer, task = dict(config.optim_wrapper.optimizer), TASK[name]
        if name in MINI or field['size'] == 'quickstart':
            return
        if task == 'image_classification':
            total = field['gpus'] * field['batch']
            if field['what'] != 'deit3':
                assert optimizer['lr'] == pytest.approx(5e-4 * total / 512)
            assert optimizer['weight_decay'] == 0.05
        elif task in ('super_resolution', 'point_cloud'):
            assert optimizer == dict(type='Adam', lr=3e-3, weight_decay=0.1)
            assert config.model.decoder.drop_rate == 0.1
            assert config.train_cfg.val_interval == config.custom_hooks[0].interval
        elif name in DECODERS and field['gpus'] == 8:
            text = 'enwik8' in name
            # Of the ICLR submission; AFT-simple is in arXiv 2105.14103 as well.
            submission = re.match('aft-relu|aft-local2d-hard|aft-local-learned', name)
            assert optimizer['type'] == ('Adam' if submission else 'AdamW')
            assert optimizer['lr'] == 3e-3 and optimizer['weight_decay'] == (0.5 if text else 0.1)
            assert config.model.decoder.drop_rate == 0.1
            softmax_on_images = 'transformer' in name and not text
            assert 8 * field['batch'] == (32 if softmax_on_images else 128)
        elif name in DECODERS:
            assert optimizer == dict(type='RAdam', lr=1e-4)
            small = 1 if name.startswith('transformer') else 4
            assert field['batch'] == (10 if 'mnist' in name else small)
        elif task == 'speech_recognition':
            lstm = dict(type='Adam', lr=1e-3)
            assert optimizer == (lstm if 'lstm' in name else dict(type='RAdam', lr=1e-4))

    @every_config
    def test_hooks_and_metrics(self, name):
        config, task, what = load(name), TASK[name], fields(name)['what']
        ours = [hook for hook in config.default_hooks.values() if hook.type.startswith('aft_mm.')]
        built = [HOOKS.build(hook) for hook in [*ours, *config.get('custom_hooks', [])]]
        hooks = {type(hook).__name__ for hook in built}
        # A resumed run repeats one that was never killed, and NaN stops it.
        assert {'EpochSeedHook', 'FiniteLossHook'} <= hooks
        assert not config.train_dataloader.persistent_workers
        translates = {m.type for m in as_list(config.test_evaluator)} & {'aft_mm.BLEU'}
        if translates and MISSING:
            return
        val, test = (
            [METRICS.build(metric) for metric in as_list(evaluator)]
            for evaluator in (config.val_evaluator, config.test_evaluator)
        )
        if task == 'image_classification':
            assert 'CheckImagesHook' in hooks  # truncated images stop a run
            assert ('EMAHook' in hooks) == ('in1k' in name)
            assert ('RegularizationHook' in hooks) == (what == 'entropy')
        elif name in DECODERS:
            assert ('SampleHook' in hooks) == ('enwik8' not in name)
            per = 'char' if 'enwik8' in name else 'dim'
            assert [metric.per for metric in (*val, *test)] == [per, per]
        elif name in SPEECH:
            assert {'DataReportHook', 'EpochTimeHook'} <= hooks
        elif name in (*PAIRS, *CLOUDS):
            assert {'DataReportHook', 'FirstSampleHook'} <= hooks
            kinds = ['Likelihood', 'ImageQuality' if name in PAIRS else 'PointCloudDistance']
            assert [type(metric).__name__ for metric in test] == kinds
            assert [type(metric).__name__ for metric in val] == ['Likelihood']
            assert test[0].per == 'dim' and config.test_cfg.type == 'aft_mm.GenerationTestLoop'
            picture = config.custom_hooks[0]
            if name in PAIRS:
                assert picture.type == 'aft_mm.SuperResolutionHook'
                for part in (test[1], built[-1]):
                    assert part.image_shape == config.image_shape
                    assert part.source_shape == config.source_shape
                assert config.test_cfg.temperature == 0.8 and config.test_cfg.num_samples > 1
            else:
                assert picture.type == 'aft_mm.PointCloudHook' and config.test_cfg.num_samples == 1
                assert test[1].num_bits == picture.num_bits == config.point_cloud.num_bits
                up = 'z' if 'modelnet' in name else 'y'
                assert picture.up == config.point_cloud.up == up

    @pytest.mark.parametrize(
        'name',
        [
            name
            for name in PATHS
            if (name in MINI or name in COPY or name in SPEECH or 'quickstart' in name)
            and 'imagefolder' not in name
        ],
    )
    def test_small_models_train(self, name):
        torch.manual_seed(0)
        config = load(name)
        model = MODELS.build(model_settings(config))
        batch = model.data_preprocessor(training_batch(name, config, model), training=True)
        if name in PAIRS:
            for sample in batch['data_samples']:
                sample.source = torch.randint(0, 256, (64, 3))
        loss = model(**batch, mode='loss')['loss']
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        if name in SPEECH:
            # Every unit is about as likely in each frame as any other.
            targets = [sample.units for sample in batch['data_samples']]
            lengths = [sample.length for sample in batch['data_samples']]
            even = torch.zeros(len(lengths), batch['inputs'].shape[1], model.head.num_classes)
            nats = model.head.nats(even.log_softmax(-1), lengths, targets).sum()
            expected = nats.item() / sum(map(len, targets))
            assert loss.item() == pytest.approx(expected, rel=0.15)
            assert math.isfinite(model(**batch, mode='predict')[0].score)
        elif name in TRANSLATION:  # the table and hidden vectors are long
            assert math.log(3000) < loss.item() < math.log(3000) + 2
        else:
            chance, gap = (256, 1.5)
            if name in (*CLASSIFIERS, *COPY):
                chance, gap = (11 if name in COPY else 10), 0.7
            assert loss.item() == pytest.approx(math.log(chance), abs=gap)
        if name in COPY:
            metrics = {}
            samples = [sample.to_dict() for sample in model(**batch, mode='predict')]
            for evaluator in config.test_evaluator:
                metric = METRICS.build(evaluator)
                metric.process(None, samples)
                metrics |= metric.compute_metrics(metric.results)
            assert metrics['bits_per_token'] == pytest.approx(loss.item() / math.log(2), rel=1e-4)
            assert 0 <= metrics['percent_correct_tokens'] < 60

    @pytest.mark.parametrize(
        ('name', 'numbers'),
        [
            (
                'aft-local2d-mini_1xb8-16e_celeba-8to32',
                'bits_per_dim perplexity_per_dim '
                'sample_psnr_db sample_ssim sample_consistency_mse '
                'mean_psnr_db mean_ssim mean_consistency_mse '
                'bicubic_psnr_db bicubic_ssim bicubic_consistency_mse',
            ),
            (
                'aft-local-96-mini_1xb4-40e_modelnet10-chair',
                'bits_per_dim perplexity_per_dim mmd_squared_edges coverage_percent 1nna_percent',
            ),
        ],
    )
    def test_real_files_are_tested_without_a_warning_about_scopes(
        self, name, numbers, shared_data, tmp_path, monkeypatch, caplog
    ):
        """With a smaller model, and a hundred points in the place of 1,024."""
        monkeypatch.setenv('AFT_MM_DATA', str(shared_data))
        config = Config.fromfile(PATHS[name])
        dataset = config.test_dataloader.dataset
        if not Path(dataset.data_root).is_dir():
            pytest.skip(f'the pack {Path(dataset.data_root).name} is not at {shared_data}')
        dataset.indices = 3
        config.test_cfg.num_inputs = 2
        for part in filter(None, (config.model.get('encoder'), config.model.decoder)):
            part.update(embed_dims=16, num_layers=1)
        config.model.head.embed_dims = 16
        if name in CLOUDS:
            dataset.pipeline[-1].num_points = 100
            config.model.decoder.grid = (300,)
        config.update(work_dir=str(tmp_path), experiment_name=name)
        with caplog.at_level(logging.WARNING):
            metrics = RUNNERS.build(config).test()
        assert 'Failed to search registry' not in caplog.text
        assert metrics.keys() == set(numbers.split())
        assert metrics['bits_per_dim'] == pytest.approx(8, abs=1.5)
        assert all(map(math.isfinite, metrics.values()))


def training_batch(name, config, model):
    """A batch of two, as a data loader gives it."""
    if name in CLASSIFIERS:
        size = config.model.backbone.img_size
        shape = (config.model.backbone.get('in_channels', 3), size, size)
        image = np.zeros((size, size, shape[0]), np.uint8)
        packed = Compose([dict(type='PackInputs')])(dict(img=image, gt_label=3))
        inputs = torch.randint(0, 256, (2, *shape), dtype=torch.uint8)
        return dict(inputs=inputs, data_samples=[packed['data_samples']] * 2)
    if name in COPY:
        data = DATASETS.build(config.test_dataloader.dataset)
        samples = [data[index] for index in range(4)]
    elif name in TRANSLATION:
        rows = [torch.randint(3000, (size,)) for size in (9, 17)]
        samples = [dict(inputs=x, data_samples=SequenceSample(source=x.flip(0))) for x in rows]
    elif name in SPEECH:
        load_step, *steps = config.train_dataloader.dataset.pipeline
        steps = [step for step in steps if step.type != 'aft_mm.SpecAugment']
        width = 13 if 'an4' in name else load_step.num_mel_bins
        samples = [
            Compose(steps)(
                dict(
                    features=np.random.default_rng(0).standard_normal((length, width)).astype('f4'),
                    name='a',
                    units=units,
                )
            )
            for length, units in ((47, (5, 5, 4)), (20, (3,)))
        ]
    else:
        length = 1024 if name in PAIRS else 99 if name in CLOUDS else min(97, sequence_length(name))
        channels = (3,) if name in PAIRS or 'pixels' in name else ()
        return dict(inputs=list(torch.randint(0, 256, (2, length, *channels), dtype=torch.uint8)))
    return {key: [sample[key] for sample in samples] for key in samples[0]}


class TestParameters:
    """Counts by hand, in the papers, and of models that are compared."""

    @pytest.mark.parametrize(
        'name',
        [*names('image_classification', pattern='_in1k'), *DECODERS, *PAIRS, *CLOUDS, *TRANSLATION],
    )
    def test_layout(self, name):
        assert count(name) == expected_parameters(load(name).model, build(name))

    @pytest.mark.parametrize(
        ('millions', 'name'),
        [
            # Table 7 of arXiv 2105.14103, and 86.9 of table 8.
            (5.7, 'deit-tiny_8xb128-300e_in1k'),
            (22.1, 'deit-small_8xb128-300e_in1k'),
            (4.8, 'lambda-tiny_8xb128-300e_in1k'),
            (17.7, 'lambda-small_8xb128-300e_in1k'),
            (6.3, 'aft-full-tiny_8xb128-300e_in1k'),
            (22.6, 'aft-full-small_8xb128-300e_in1k'),
            (5.4, 'aft-conv-tiny-h32-k11_8xb128-300e_in1k'),
            (5.9, 'aft-conv-tiny-h192-k11_8xb128-300e_in1k'),
            (20.3, 'aft-conv-small-h16-k11_8xb128-300e_in1k'),
            (22.5, 'aft-conv-small-h384-k11_8xb128-300e_in1k'),
            (23.0, 'aft-conv-small-h384-k15_8xb128-300e_in1k'),
            (86.9, 'deit-base_8xb8-100e_in1k-384px'),
            # Tables 2 and 4 of both papers.
            (35, 'reformer-l12-d512-h8_8xb16-100e_enwik8-t1024'),
            (42, 'synthesizer-l12-d512-h8_8xb16-100e_enwik8-t1024'),
            (39, 'linear-l12-d512-h8_8xb16-100e_enwik8-t1024'),
            (39, 'transformer-l12-d512-h8_8xb16-100e_enwik8-t1024'),
            (20, 'transformer-l24-d256-h2_8xb4-200e_cifar10'),
            (20, 'aft-simple-l24-d256_8xb16-200e_cifar10'),
            (20, 'aft-relu-l24-d256_8xb16-200e_cifar10'),
            (20, 'aft-relu2-l24-d256_8xb16-200e_cifar10'),
            (20, 'aft-relu-softmax-l24-d256_8xb16-200e_cifar10'),
            (20, 'aft-local2d-hard-l24-d256_8xb16-200e_cifar10'),
            (29, 'aft-local-256-l24-d256_8xb16-200e_cifar10'),
            (29, 'aft-local-learned-l24-d256_8xb16-200e_cifar10'),
            (49, 'aft-local-256-l12-d512_8xb16-200e_cifar10'),
            (49, 'aft-local-learned-l12-d512_8xb16-200e_cifar10'),
            (32, 'aft-local-32-l24-d256_8xb16-100e_enwik8-t1024'),
            (45, 'aft-local-32-l24-d256_8xb16-100e_enwik8-t2048'),
            (45, 'aft-local-32-l12-d512_8xb16-100e_enwik8-t1024'),
            (32, 'aft-local-learned-32-l24-d256_8xb16-100e_enwik8-t1024'),
            (45, 'aft-local-learned-32-l24-d256_8xb16-100e_enwik8-t2048'),
            (45, 'aft-local-learned-32-l12-d512_8xb16-100e_enwik8-t1024'),
        ],
    )
    def test_papers(self, millions, name):
        """Table 7 sometimes rounds (22.05 to 22.1) and sometimes cuts off (5.96 to 5.9)."""
        counted = count(name) / 1e6
        digits = 1 if isinstance(millions, float) else 0
        cut = math.floor(counted * 10) / 10 if digits else millions
        assert millions in (round(counted, digits), cut if digits else None)

    def test_the_sparse_transformer_has_59_million_but_for_its_positions(self):
        """arXiv 1904.10509 adds tables of 32 rows, 32 columns and 3 colours, ours has 3,072."""
        others = count('sparse-transformer-l128-d256-h2_8xb4-200e_cifar10') - 3072 * 256
        assert round((others + 67 * 256) / 1e6) == 59

    @pytest.mark.parametrize(
        ('group', 'number', 'ratio'),
        [
            (names('image_classification', pattern='-mini.*8e_cifar10'), 3, 1.04),
            (names('image_classification', pattern='-mini.*40e_imagenette'), 3, 1.04),
            (names('speech_recognition', pattern='an4-phonemes'), 7, 1.25),
            (names('machine_translation', pattern='mini'), 3, 1.005),
            (names('machine_translation', pattern='base'), 3, 1.005),
        ],
        ids=['cifar10', 'imagenette', 'an4', 'multi30k', 'wmt14'],
    )
    def test_compared_models_are_of_like_size(self, group, number, ratio):
        sizes = [count(name) for name in group]
        assert len(sizes) == number and max(sizes) < ratio * min(sizes)

    @pytest.mark.parametrize(
        ('mixer', 'width'),
        [
            ('transformer-mini', 512),
            ('image-transformer-local1d-mini', 512),
            ('sparse-transformer-mini', 512),
            ('reformer-mini', 576),
            ('linear-mini', 512),
            ('performer-mini', 512),
            ('synthesizer-mini', 445),
            ('aft-simple-mini', 512),
            ('aft-full-mini', 384),
            ('aft-local-32-mini-narrow', 384),
            ('aft-local-learned-32-mini', 384),
            ('aft-local-hard-32-mini', 512),
            ('aft-conv-mini-h4-k31', 574),
        ],
    )
    def test_mixers_on_text_are_compared_at_equal_size(self, mixer, width):
        """The width of the MLPs makes the sizes equal, within one channel of each."""
        model, narrow, _ = mixer.partition('-narrow')
        name = f'{model}_1xb16-6e{narrow}_enwik8-t256'
        gap = count(name) - count('transformer-mini_1xb16-6e_enwik8-t256')
        assert abs(gap) <= 4 * (2 * 128 + 1)  # layers, width
        assert load(name).model.decoder.get('mlp_ratio', 4) * 128 == width


def mixer_parameters(mixer, dims, length, axes=1):
    """Weights of a mixer of `length` tokens on a grid of so many axes."""
    linear, heads = dims * dims + dims, mixer.get('num_heads', 0)
    kind = mixer.type.removeprefix('aft_mm.')
    if kind == 'LSHAttention':  # query and key are one
        return 3 * linear
    if kind == 'DenseSynthesizer':
        # No key; per head, each channel and a bias give a weight to each token.
        return 3 * linear + (dims + heads) * length
    if kind == 'LambdaLayer':
        queries, keys = heads * mixer.key_dims, mixer.key_dims
        offsets = (2 * math.isqrt(length) - 1) ** 2 * keys
        return linear + (dims + 2) * (queries + keys) + (dims + 1) * (dims // heads) + offsets
    if kind == 'AFTConv':  # a key per head; per head a kernel, its scale and its shift
        places = mixer.kernel_size**axes
        kernels = heads * (places + 2 * mixer.get('reparameterize', True))
        return linear * (2 + mixer.get('query', True)) + (dims + 1) * heads + kernels
    if mixer.get('qk_dims'):  # queries and keys of half the width
        return 3 * linear
    if mixer.get('rank'):
        return 4 * linear + 2 * length * mixer.rank
    if 'rank' in mixer:  # a bias for all pairs, or for a token and the window − 1 before it
        sources = mixer.get('window', prod(mixer.get('source_grid', (length,))))
        return 4 * linear + length * sources
    return 4 * linear


def expected_parameters(model, built):
    """Weights of a model, added up by hand from its layout."""
    part = main_part(built)
    dims, layers = part.embed_dims, len(part.layers)
    hidden = 4 * dims if 'backbone' in model else int(dims * main_part(model).get('mlp_ratio', 4))

    def block(mixer, length, cross=0, axes=1):
        return mixer_parameters(mixer, dims, length, axes) + cross + 4 * dims + mlp

    mlp = 2 * dims * hidden + hidden + dims
    norm = 2 * dims
    if 'backbone' in model:
        mixer, places = model.backbone.token_mixer, (model.backbone.img_size // 16) ** 2
        kind = mixer.type.removeprefix('aft_mm.')
        tokens = places if kind in ('AFTConv', 'LambdaLayer') else places + 1  # and the class
        positions = dict(AFTConv=0, LambdaLayer=places).get(kind, tokens + 1) * dims
        patches, head = (3 * 256 + 1) * dims, (dims + 1) * 1000
        return patches + positions + layers * block(mixer, tokens, axes=2) + norm + head

    def stack(part, positions=True):
        length, cross = prod(part.grid), 0
        if 'cross_mixer' in part:
            cross = mixer_parameters(part.cross_mixer, dims, length) + norm
        table = length // part.get('tokens_per_position', 1) * dims if positions else 0
        return table + part.num_layers * block(part.token_mixer, length, cross) + norm

    if 'label_smoothing' in model.head:  # translation, with one table of subwords for all
        table = built.decoder.embedding.weight.shape[0] * (dims + 1)
        return table + stack(model.encoder, False) + stack(model.decoder, False) + dims
    channels = model.head.get('num_channels', 1)
    inputs = (
        channels + 1
        if channels == 3
        else 256 + (3 if 'tokens_per_position' in model.decoder else 0)
    )
    # A mixture: per component a weight, per channel a mean and a scale, and 3 for the means of RGB.
    outputs = 256
    if model.head.type == 'aft_mm.LogisticMixtureHead':
        outputs = 10 * (1 + 2 * channels + (3 if channels == 3 else 0))
    total = inputs * dims + stack(model.decoder) + dims + (dims + 1) * outputs
    return total + (4 * dims + stack(model.encoder) if 'encoder' in model else 0)


def without(config, *keys):
    """A config as a dict without the entries of dotted keys."""
    config = config.to_dict()
    for key in keys:
        *parents, last = key.split('.')
        part = config
        for parent in parents:
            part = part[parent]
        part.pop(last, None)
    return config


MIXER = 'model.decoder.token_mixer'
READERS = 'model.encoder.token_mixer', 'model.decoder.cross_mixer'
TABLE_8 = ['aft-conv-base-h32-k25_8xb8-100e_in1k-384px', 'deit-base_8xb8-100e_in1k-384px']
WINDOWS = [1, 2, 4, 8, 32, 64, 128, 256, 512, 1024]


class TestExperiments:
    """Configs that are compared differ in what is compared alone."""

    @pytest.mark.parametrize(
        ('group', 'number', 'keys'),
        [
            (TABLE_8, 2, ['model']),
            (names('copy_task', pattern='l4-d256'), 6, [MIXER]),
            (names('copy_task', pattern='mini'), 6, [MIXER]),
            (names('language_modeling', pattern='mini'), 21, [MIXER, 'model.decoder.mlp_ratio']),
            (names('image_ar', pattern='mini.*mnist'), 3, [MIXER, 'model.decoder.grid']),
            (names('super_resolution', pattern='2d-hard-.*8to32'), 3, READERS),
            (names('super_resolution', pattern='aft-local2d-mini.*celeba'), 2, READERS),
            (names('speech_recognition', pattern='wsj'), 8, ['model', 'optim_wrapper.optimizer']),
            (names('speech_recognition', pattern='an4-phonemes'), 7, ['model']),
            (names('machine_translation', pattern='base'), 3, [MIXER]),
            (names('machine_translation', pattern='mini'), 3, [MIXER]),
            *(
                (
                    [f'{family}-{w}-l24-d256_8xb16-100e_enwik8-t1024' for w in windows],
                    len(windows),
                    [f'{MIXER}.window'],
                )
                for family, windows in (
                    ('aft-local', WINDOWS),  # table 5 of arXiv 2105.14103, window 0: AFT-simple
                    ('aft-local-learned', [0, *WINDOWS]),  # table 4 of the submission
                )
            ),
            *(
                (
                    [f'aft-local{learned}-32-{size}_8xb16-100e_enwik8-{length}' for learned in ('', '-learned')],
                    2,
                    [f'{MIXER}.type', 'optim_wrapper.optimizer.type'],
                )
                for size, length in (('l12-d512', 't1024'), ('l24-d256', 't1024'), ('l24-d256', 't2048'))
            ),
        ],
    )  # fmt: skip
    def test_differ_only_in(self, group, number, keys):
        first, *others = [without(load(name), *keys) for name in group]
        assert len(group) == number and all(other == first for other in others)

    def test_every_row_of_the_tables_has_a_config(self):
        """Tables 4 and 6 of arXiv 2105.14103, tables 6 and 7 of the submission."""
        models = 'transformer-l12-d512-h8 transformer-l24-d256-h4 aft-local-32-l12-d512 '
        models += 'aft-local-32-l24-d256 aft-simple-l24-d256'
        expected = {
            f'{model}_8xb16-100e_enwik8-t{length}'
            for model in models.split()
            for length in (1024, 2048, 4096)
        }
        expected |= {
            f'{model}_8xb16-200e_celeba-8to32'
            for model in (
                'image-transformer-local1d-l12-d512-h8',
                'image-transformer-local2d-l12-d512-h8',
                'aft-local2d-hard-l32-d256',
            )
        }
        expected |= {
            f'{model}-l24-d256_8xb16-{epochs}e_shapenet-{classes}'
            for model in ('aft-local-256', 'aft-simple')
            for classes, epochs in dict(all=200, airplane=1000, chair=1000, car=1000).items()
        }
        assert expected <= set(PATHS)

    @pytest.mark.parametrize('name', DECODERS)
    def test_heads_of_decoders(self, name):
        head, what = load(name).model.head, fields(name)['what']
        if what in ('logistic', 'logistic-pixels', 'pixels'):
            assert head.type == 'aft_mm.LogisticMixtureHead' and head.num_components == 10
            assert head.num_channels == (3 if what.endswith('pixels') else 1)
        else:
            assert head.type == 'aft_mm.CategoricalHead' and head.num_classes == 256

    @pytest.mark.parametrize('name', PAIRS)
    def test_mixers_that_read_the_small_image(self, name):
        """Softmax attention of 8 heads in full models, AFT in small ones, if not named."""
        model, what = load(name).model, fields(name)['what']
        softmax = dict(type='aft_mm.SoftmaxAttention', num_heads=8)
        free = dict(type='aft_mm.AFTFull', rank=None)
        usual = 'aft-cross' if name in MINI else None
        encoder, cross = model.encoder.token_mixer, model.decoder.cross_mixer
        assert encoder == (free if (what or usual) in ('aft-encoder', 'aft-cross') else softmax)
        places = dict(free, grid=model.decoder.grid, source_grid=model.encoder.grid)
        assert cross == (places if (what or usual) == 'aft-cross' else softmax)

    @pytest.mark.parametrize('name', TRANSLATION)
    def test_translation_shares_one_table(self, name):
        config, model = load(name), build(name)
        table = model.decoder.embedding.weight
        shaped = [key for key, p in model.named_parameters() if p.shape == table.shape]
        assert shaped == ['decoder.embedding.weight'] and model.head.tied
        assert model.encoder.embedding is model.decoder.embedding
        for stack, part in (('encoder', 'token_mixer'), ('decoder', 'cross_mixer')):
            assert config.model[stack][part]['type'] == 'aft_mm.SoftmaxAttention'

    def test_only_fine_tuning_loads_weights(self):
        loading = [name for name in CLASSIFIERS if load(name).load_from]
        assert loading == names('image_classification', pattern='from-deit')

    def test_a_model_trained_at_224_px_is_tested_at_384_px(self):
        name = 'aft-conv-small-h384-k15_8xb128-300e'
        torch.manual_seed(0)
        trained, tested = (
            MODELS.build(model_settings(load(full))).eval()
            for full in (f'{name}_in1k', f'{name}-test-only_in1k-384px')
        )
        tested.load_state_dict(trained.state_dict(), strict=True)
        assert trained.backbone.grid == (14, 14) and tested.backbone.grid == (24, 24)
        image = torch.randn(1, 3, 384, 384)
        with torch.no_grad():
            torch.testing.assert_close(tested(image), trained(image))
        at_384 = load(TABLE_8[0])
        for key in ('val_dataloader', 'test_dataloader', 'tta_pipeline'):
            assert load(f'{name}-test-only_in1k-384px')[key] == at_384[key]

    def test_the_entropy_penalty_of_small_models_is_that_of_large_ones(self):
        small = load('aft-conv-mini-h96-k7_1xb50-40e-entropy_imagenette-64px')
        large = load('aft-conv-small-h384-k11_8xb128-300e-entropy_in1k')
        assert small.custom_hooks == large.custom_hooks[1:]

    def test_copy_task(self):
        """Section 4.1.1 of arXiv 2006.16236, and a quarter of it."""
        large, small = (
            load('linear-l4-d256-h8_1xb64-10e_copy'),
            load('linear-mini_1xb32-10e_copy-t32'),
        )
        for config, batch, length, iterations in ((large, 64, 128, 10_000), (small, 32, 32, 1000)):
            (schedule,) = config.param_scheduler
            assert config.optim_wrapper.optimizer == dict(type='RAdam', lr=1e-3)
            assert (schedule.type, schedule.gamma, schedule.by_epoch) == ('MultiStepLR', 0.1, False)
            assert schedule.milestones == [3000 if config is large else 800]
            assert (
                config.train_dataloader.batch_size == config.auto_scale_lr.base_batch_size == batch
            )
            for split in SPLITS:
                data = DATASETS.build(config[f'{split}_dataloader'].dataset)
                assert (data.max_length, data.num_symbols) == (length, 10)
                if split == 'train':
                    assert len(data) // batch * config.train_cfg.max_epochs == iterations
            assert config.model.decoder.grid == (length,)

    def test_speech_recognition(self):
        """Section 4.3 of arXiv 2006.16236."""
        config = load('linear-l9-h6_1xb16-100e_wsj')
        (schedule,) = config.param_scheduler
        assert schedule['factor'] == 0.5 and schedule['rule'] == 'less'
        assert schedule['monitor'] == 'phoneme_error_rate'
        assert config.train_dataloader.dataset.max_frames == 2400
        for name in names('speech_recognition', pattern='wsj'):
            if 'lstm' not in name:
                assert load(name).model.encoder.embedding.num_features == 40
                assert load(name).model.encoder.grid == (2400,)

    def test_the_translation_recipe_is_that_of_opennmt(self):
        config = load('transformer-base_8xb4096-200k_wmt14-en-de')
        model = config.model
        assert (
            model.head.label_smoothing == model.encoder.drop_rate == model.decoder.drop_rate == 0.1
        )
        assert model.encoder.positions == model.decoder.positions == 'sinusoidal'
        optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=9.88e-4)
        schedules = []
        for settings in config.param_scheduler:
            settings = {'end': 200_000, **settings}
            schedules.append(PARAM_SCHEDULERS.get(settings.pop('type'))(optimizer, **settings))
        rates = {}
        for step in range(1, 10_001):
            rates[step] = optimizer.param_groups[0]['lr']
            optimizer.step()
            for schedule in schedules:
                schedule.step()
        # 2 · d^-0.5 · min(t^-0.5, t · 8000^-1.5), t counted from 1; mmengine counts from 0.
        for step in (2, 100, 4000, 8000, 10_000):
            noam = 2 * 512**-0.5 * min(step**-0.5, step * 8000**-1.5)
            assert rates[step] == pytest.approx(noam, rel=2e-3), step

    def test_a_run_starts_without_a_warning_about_scopes(self, tmp_path, caplog):
        config = load('aft-simple-mini_1xb16-6e_enwik8-t256').copy()
        config.update(work_dir=str(tmp_path), experiment_name='scopes')
        with caplog.at_level(logging.WARNING):
            RUNNERS.build(config)
        assert 'Failed to search registry' not in caplog.text
