"""Every leaf of images and text as sequences loads, builds and says in its name what it is."""

import logging
import re
from math import prod

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DATASETS, HOOKS, METRICS, RUNNERS

from .leaves import build_leaf, leaves, load_leaf

LEAVES = leaves('image_ar', 'language_modeling')
NAME = re.compile(
    r'(?P<family>transformer|image-transformer-local[12]d|sparse-transformer|linear|performer'
    r'|reformer|synthesizer|lsh-(?P<rounds>\d)|aft-simple|aft-full|aft-conv|aft-relu|aft-relu2'
    r'|aft-relu-softmax|aft-local2d-hard|aft-local-learned'
    r'|aft-local(?:-learned|-hard)?-(?P<window>\d+))'
    r'-(?:l(?P<layers>\d+)-d(?P<dims>\d+)(?:-h(?P<heads>\d+))?|mini(?:-h4-k31)?)'
    r'_(?P<gpus>\d+)xb(?P<batch>\d+)-(?:(?P<epochs>\d+)e|(?P<days>\d+)d)'
    r'(?:-(?P<what>narrow|nonfactorised|logistic|logistic-pixels|pixels))?'
    r'_(?P<data>cifar10|mnist|enwik8)(?:-t(?P<length>\d+))?'
)
# What each family's mixer is, of the large models; what a name says, and ranks, are held apart.
MIXERS = {
    'transformer': dict(type='aft_mm.SoftmaxAttention'),
    'image-transformer-local2d': dict(type='aft_mm.LocalSoftmaxAttention', window=(16, 16)),
    'sparse-transformer': dict(type='aft_mm.StridedAttention', stride=128, qk_dims=128),
    'linear': dict(type='aft_mm.LinearAttention'),
    'performer': dict(type='aft_mm.PerformerAttention', redraw=1000),
    'reformer': dict(type='aft_mm.LSHAttention', num_rounds=4, num_buckets=64, chunk_size=32),
    'lsh': dict(type='aft_mm.LSHAttention', num_buckets=64, chunk_size=32),
    'synthesizer': dict(type='aft_mm.DenseSynthesizer'),
    'aft-local': dict(type='aft_mm.AFTLocal'),
    'aft-full': dict(type='aft_mm.AFTFull'),
    'aft-conv': dict(type='aft_mm.AFTConv', kernel_size=31),
    'aft-local-hard': dict(type='aft_mm.AFTLocalHard'),
    'aft-simple': dict(type='aft_mm.AFTSimple'),
    'aft-relu': dict(type='aft_mm.AFTSimple', key_function='relu', gate='relu'),
    'aft-relu2': dict(type='aft_mm.AFTSimple', key_function='relu2', gate='relu'),
    'aft-relu-softmax': dict(type='aft_mm.AFTSimple', gate='relu'),
    'aft-local2d-hard': dict(type='aft_mm.AFTLocalHard', window=(16, 16)),
    'aft-local-learned': dict(type='aft_mm.AFTLocalLearned', window=256),
}
# Where the length of a small one asks for another number.
SMALL = {
    'image-transformer-local1d': dict(type='aft_mm.LocalSoftmaxAttention', window=32),
    'sparse-transformer': dict(type='aft_mm.StridedAttention', stride=16),
    'reformer': dict(type='aft_mm.LSHAttention', num_rounds=4, num_buckets=16, chunk_size=16),
}
# Those of the ICLR submission; AFT-simple is in arXiv 2105.14103 too.
IMAGES = dict(cifar10=(32, 32, 3), mnist=(28, 28, 1))
PAPER = [name for name in LEAVES if '_8xb' in name]
MINI = [name for name in LEAVES if re.search('-mini[-_]', name)]

every_leaf = pytest.mark.parametrize('name', LEAVES)


def load(name):
    return load_leaf(LEAVES[name])


def build(name):
    return build_leaf(LEAVES[name])


def fields(name):
    return NAME.fullmatch(name).groupdict()


def count(name):
    return sum(parameter.numel() for parameter in build(name).parameters())


def family(name):
    """The family without its window."""
    return re.sub(r'-\d+$', '', fields(name)['family'])


def is_logistic(name):
    return fields(name)['what'] in ('logistic', 'logistic-pixels', 'pixels')


def sequence_length(name):
    """Tokens that the name promises."""
    field = fields(name)
    if field['data'] == 'enwik8':
        return int(field['length'])
    shape = IMAGES[field['data']]
    return prod(shape[:2] if (field['what'] or '').endswith('pixels') else shape)


@every_leaf
def test_name_says_the_mixer(name):
    field, mixer = fields(name), dict(load(name).model.decoder.token_mixer)
    heads, rank = mixer.pop('num_heads', None), mixer.pop('rank', 'no bias')
    expected = dict((name in MINI and SMALL.get(family(name))) or MIXERS[family(name)])
    if field['window']:
        expected['window'] = int(field['window'])
    elif field['rounds']:
        expected['num_rounds'] = int(field['rounds'])
    elif '2d' in name and name in MINI:
        expected['window'] = (8, 8)
    assert mixer == expected
    assert (heads is not None) == (not name.startswith('aft-') or family(name) == 'aft-conv')
    if field['layers']:
        assert str(heads) == str(field['heads'])
    assert (rank is None) == (field['what'] == 'nonfactorised')


@every_leaf
def test_name_says_the_size(name):
    field, decoder = fields(name), load(name).model.decoder
    assert len(build(name).decoder.layers) == int(field['layers'] or 4)
    assert decoder.embed_dims == load(name).model.head.embed_dims == int(field['dims'] or 128)
    assert prod(decoder.grid) == sequence_length(name)
    assert (len(decoder.grid) == 2) == ('2d' in name)


@every_leaf
def test_name_says_the_head(name):
    head = load(name).model.head
    if is_logistic(name):
        pixels = fields(name)['what'].endswith('pixels')
        assert head.type == 'aft_mm.LogisticMixtureHead' and head.num_components == 10
        assert head.num_channels == (3 if pixels else 1)
    else:
        assert head.type == 'aft_mm.CategoricalHead' and head.num_classes == 256


@every_leaf
def test_name_says_the_schedule(name):
    field, config = fields(name), load(name)
    optimizer = config.optim_wrapper.optimizer
    assert config.train_dataloader.batch_size == int(field['batch'])
    if name not in MINI:
        total = int(field['gpus']) * int(field['batch'])
        assert config.auto_scale_lr.base_batch_size == total
    if name in PAPER:
        assert optimizer.type == 'AdamW'
        assert optimizer.lr == 3e-3
        softmax_on_images = 'transformer' in name and field['data'] == 'cifar10'
        assert total == (32 if softmax_on_images else 128)
        assert optimizer.weight_decay == (0.5 if field['data'] == 'enwik8' else 0.1)
        assert config.model.decoder.drop_rate == 0.1
    elif name not in MINI:
        assert optimizer == dict(type='RAdam', lr=1e-4)
        batch = 10 if field['data'] == 'mnist' else 1 if name.startswith('transformer') else 4
        assert total == batch

    budget = config.default_hooks.get('time_budget')
    if field['days']:
        assert budget == dict(type='aft_mm.TimeBudgetHook', days=int(field['days']))
        # An iteration of 5 ms, far faster than any, would not come to the last epoch.
        iterations = config.train_cfg.max_epochs * 50_000 // total
        assert 0.005 * iterations > int(field['days']) * 24 * 3600
        assert config.param_scheduler == [dict(type='ConstantLR', factor=1.0)]
        saved = config.default_hooks.checkpoint
        assert not saved.by_epoch and saved.interval < 50_000 // total
    else:
        assert config.train_cfg.max_epochs == int(field['epochs']) and budget is None


@every_leaf
def test_name_says_the_data(name, monkeypatch):
    monkeypatch.delenv('AFT_MM_DATA', raising=False)
    field, config = fields(name), Config.fromfile(LEAVES[name])
    loaders = [config.train_dataloader, config.val_dataloader, config.test_dataloader]
    splits = [loader.dataset.split for loader in loaders]
    for loader in loaders:
        if field['data'] == 'enwik8':
            assert loader.dataset.type == 'aft_mm.TextFile'
            assert loader.dataset.data_file == 'data/enwik8/enwik8'
            assert loader.dataset.context_length == int(field['length'])
        else:
            kinds = dict(cifar10='aft_mm.CIFAR10Binary', mnist='aft_mm.MNISTIdx')
            assert loader.dataset.type == kinds[field['data']]
            assert loader.dataset.data_root == f'data/{field["data"]}'
            assert config.image_shape == IMAGES[field['data']]
        assert DATASETS.get(loader.dataset.type)
    # CIFAR-10 and MNIST have no validation split; a text file has one.
    assert splits == ['train', 'val' if field['data'] == 'enwik8' else 'test', 'test']
    assert 'indices' not in config.test_dataloader.dataset


@every_leaf
def test_pipelines_give_what_the_model_takes(name, tmp_path):
    field, config = fields(name), load(name)
    rng = np.random.default_rng(0)
    for split in ('train', 'val', 'test'):
        dataset = config[f'{split}_dataloader'].dataset
        if field['data'] == 'enwik8':
            path = tmp_path / 'text'
            path.write_bytes(rng.integers(0, 256, 41 * int(field['length']), np.uint8).tobytes())
            packed = DATASETS.build(dict(dataset, data_file=str(path)))[0]
        else:
            image = rng.integers(0, 256, IMAGES[field['data']], dtype=np.uint8)
            packed = Compose(dataset.pipeline)(dict(img=image, gt_label=3))

        pixels = (3,) if (field['what'] or '').endswith('pixels') else ()
        assert packed['inputs'].shape == (sequence_length(name), *pixels)
        assert packed['inputs'].dtype == torch.uint8
        assert packed['data_samples'].length == sequence_length(name)
        if split == 'test' and field['data'] != 'enwik8':
            assert torch.equal(packed['inputs'].flatten(), torch.from_numpy(image).flatten())


@pytest.mark.parametrize('name', [name for name in LEAVES if 'cifar10' in name])
def test_images_are_flipped_and_shifted_but_for_the_linear_transformer_protocol(name):
    pipeline = load(name).train_dataloader.dataset.pipeline
    augmented = [step.type for step in pipeline[:-1]]
    if (fields(name)['what'] or '').startswith('logistic'):
        assert augmented == []
    else:
        assert augmented == ['mmpretrain.RandomFlip', 'aft_mm.RandomValueShift']
        assert pipeline[1].max_shift == 10 and pipeline[0].prob == 0.5


@every_leaf
def test_only_weights_of_linear_layers_are_decayed(name):
    model = build(name)
    groups = build_optim_wrapper(model, load(name).optim_wrapper).optimizer.param_groups
    decayed = {id(p): group['weight_decay'] for group in groups for p in group['params']}
    decay = load(name).optim_wrapper.optimizer.get('weight_decay', 0.0)

    assert len(decayed) == len(list(model.parameters()))
    for parameter_name, parameter in model.named_parameters():
        # A table is spared, the linear layer that pixels go through is not.
        spared = parameter.ndim == 1 or re.search(
            r'pos_bias|embedding(?!\.projection\.weight)', parameter_name
        )
        assert decayed[id(parameter)] == (0.0 if spared else decay), parameter_name


@every_leaf
def test_hooks_and_metrics_build(name):
    config = load(name)
    ours = [hook for hook in config.default_hooks.values() if hook.type.startswith('aft_mm.')]
    hooks = [HOOKS.build(hook) for hook in ours + config.get('custom_hooks', [])]
    names = {type(hook).__name__ for hook in hooks}

    assert {'FiniteLossHook', 'EpochSeedHook'} <= names
    assert ('TimeBudgetHook' in names) == bool(fields(name)['days'])
    assert ('SampleHook' in names) == (fields(name)['data'] in IMAGES)
    assert not config.train_dataloader.persistent_workers
    per = 'char' if fields(name)['data'] == 'enwik8' else 'dim'
    for evaluator in (config.val_evaluator, config.test_evaluator):
        assert METRICS.build(evaluator).per == per


def expected_parameters(name):
    """Weights of a decoder, added up by hand from its layout."""
    field, model = fields(name), load(name).model
    dims, length = model.decoder.embed_dims, sequence_length(name)
    hidden = int(dims * model.decoder.get('mlp_ratio', 4))
    # Four projections, an MLP, two norms.
    block = 4 * dims * dims + 8 * dims + (2 * dims + 1) * hidden + dims
    mixer = model.decoder.token_mixer
    if family(name) in ('reformer', 'lsh'):
        block -= dims * (dims + 1)  # query and key are one
    elif family(name) == 'synthesizer':
        # No key; per head, each channel and a bias give a weight to each token.
        block += (dims + mixer.num_heads) * length - dims * (dims + 1)
    elif mixer.get('qk_dims'):
        block -= dims * (dims + 1)  # queries and keys have half the width
    elif family(name) == 'aft-conv':
        # A key per head; per head a kernel, its scale and its shift.
        block += mixer.num_heads * (dims + 1 + mixer.kernel_size + 2) - dims * (dims + 1)
    elif mixer.get('rank'):
        block += 2 * length * mixer.rank
    elif field['what'] == 'nonfactorised':
        # Each token has a bias for itself and for each of the window − 1 tokens before it.
        block += length * mixer.window
    channels = 3 if (field['what'] or '').endswith('pixels') else 1
    embedding = (channels + 1 if channels == 3 else 256) * dims
    # A mixture: per component a weight, per channel a mean and a scale, and the 3 of RGB's means.
    outputs = 10 * (1 + 2 * channels + (3 if channels == 3 else 0)) if is_logistic(name) else 256
    layers = int(field['layers'] or 4)
    return embedding + dims + length * dims + layers * block + 2 * dims + (dims + 1) * outputs


@every_leaf
def test_parameters_are_those_of_the_layout(name):
    assert count(name) == expected_parameters(name)


@pytest.mark.parametrize(
    'millions, model',
    [
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
def test_parameters_are_those_of_the_papers(millions, model):
    assert round(count(model) / 1e6) == millions


def test_the_sparse_transformer_has_59_million_but_for_its_positions():
    """arXiv 1904.10509 adds one of 32 rows, 32 columns and 3 colours where ours learns 3,072."""
    others = count('sparse-transformer-l128-d256-h2_8xb4-200e_cifar10') - 3072 * 256
    assert round((others + 67 * 256) / 1e6) == 59


def test_ranks_are_those_of_the_paper():
    ranks = {name: load(name).model.decoder.token_mixer.get('rank') for name in PAPER}
    for name, rank in ranks.items():
        if rank is not None:
            wide = {'256': 64, '512': 128}[fields(name)['dims']]
            assert rank == (256 if 'enwik8' in name else wide), name


WINDOWS = [1, 2, 4, 8, 32, 64, 128, 256, 512, 1024]


@pytest.mark.parametrize(
    'family, window',
    [('aft-local', window) for window in WINDOWS]
    + [('aft-local-learned', window) for window in (0, *WINDOWS)],
)
def test_every_window_of_a_table_differs_in_the_window_only(family, window):
    """Table 5 of arXiv 2105.14103, whose window 0 is AFT-simple; table 4 of the submission."""
    reference = load(f'{family}-32-l24-d256_8xb16-100e_enwik8-t1024').to_dict()
    reference['model']['decoder']['token_mixer']['window'] = window
    found = load(f'{family}-{window}-l24-d256_8xb16-100e_enwik8-t1024').to_dict()
    assert found == reference


@pytest.mark.parametrize(
    'size',
    [
        'l12-d512_8xb16-100e_enwik8-t1024',
        'l24-d256_8xb16-100e_enwik8-t1024',
        'l24-d256_8xb16-100e_enwik8-t2048',
    ],
)
def test_the_submission_differs_from_arxiv_in_the_mixer_only(size):
    arxiv, submission = (
        load(f'{family}-32-{size}').to_dict() for family in ('aft-local', 'aft-local-learned')
    )
    arxiv['model']['decoder']['token_mixer']['type'] = 'aft_mm.AFTLocalLearned'
    assert submission == arxiv


@pytest.mark.parametrize('length', [1024, 2048, 4096])
@pytest.mark.parametrize(
    'model',
    [
        'transformer-l12-d512-h8',
        'transformer-l24-d256-h4',
        'aft-local-32-l12-d512',
        'aft-local-32-l24-d256',
        'aft-simple-l24-d256',
    ],
)
def test_every_model_of_table_4_has_every_length_of_table_6(model, length):
    assert f'{model}_8xb16-100e_enwik8-t{length}' in LEAVES


def test_a_run_starts_without_a_warning_about_scopes(tmp_path, caplog):
    config = load('aft-simple-mini_1xb16-6e_enwik8-t256').copy()
    config.update(work_dir=str(tmp_path), experiment_name='scopes')
    with caplog.at_level(logging.WARNING):
        RUNNERS.build(config)
    assert 'Failed to search registry' not in caplog.text
