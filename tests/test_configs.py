"""Every leaf of configs/ is short and listed; those of image classification build and are named."""

import ast
import math
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DATASETS, HOOKS, MODELS, init_default_scope
from PIL import Image

ROOT = Path(__file__).parents[1]
TASKS = sorted(path.parent for path in ROOT.glob('configs/*/metafile.yml'))
# Tasks whose configs are those of mmdet and mmseg.
DOWNSTREAM = {'detection', 'segmentation'}
LEAVES = {path.stem: path for path in sorted(ROOT.glob('configs/image_classification/*.py'))}
NAME = re.compile(
    r'(?P<family>deit|lambda|aft-full|aft-conv)-'
    r'(?P<arch>tiny|small|base|mini|quickstart)(?:-h(?P<heads>\d+)-k(?P<kernel>\d+))?'
    r'_(?P<gpus>\d+)xb(?P<batch>\d+)-(?P<epochs>\d+)e(?:-(?P<what>[a-z][a-z0-9-]*))?'
    r'_(?P<data>in1k|imagenette|cifar10|digits)(?:-(?P<size>\d+)px)?'
)
MIXERS = dict(
    [
        ('deit', 'aft_mm.SoftmaxAttention'),
        ('aft-full', 'aft_mm.AFTFull'),
        ('aft-conv', 'aft_mm.AFTConv'),
        ('lambda', 'aft_mm.LambdaLayer'),
    ]
)
# The part of the token mixer that each ablation changes; `rank` is that of the AFT-full models.
ABLATIONS = {
    'nonfactorised': dict(rank=None),
    'no-query': dict(query=False),
    'naive': dict(reparameterize=False),
    'no-global': dict(global_connectivity=False),
    'entropy': dict(sparsity='entropy'),
    'gumbel': dict(sparsity='gumbel', tau=0.5),
}
# Type of the data set, folder under the data root, usual image size, classes.
DATA = dict(
    in1k=('ImageNet', 'imagenet', 224, 1000),
    imagenette=('ImageNet', 'imagenette', 224, 10),
    cifar10=('aft_mm.CIFAR10Binary', 'cifar10', 32, 10),
    digits=('aft_mm.Digits', None, 8, 10),
)
DIMS = dict(tiny=192, small=384, base=768)

every_leaf = pytest.mark.parametrize('name', LEAVES)


@cache
def load(name):
    return Config.fromfile(LEAVES[name])


@cache
def build(name):
    """The model without memory for its weights."""
    config = load(name)
    init_default_scope(config.default_scope)
    with torch.device('meta'):
        return MODELS.build(dict(config.model, data_preprocessor=dict(config.data_preprocessor)))


def fields(name):
    return NAME.fullmatch(name).groupdict()


def image_size(name):
    field = fields(name)
    return int(field['size'] or DATA[field['data']][2])


def count(name):
    return sum(parameter.numel() for parameter in build(name).parameters())


def bases(path):
    """Files that a config names in ``_base_``; those of a host library are not looked for."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == '_base_':
            value = ast.literal_eval(node.value)
            return [
                base if '::' in base else (path.parent / base).resolve()
                for base in (value if isinstance(value, list) else [value])
            ]
    return []


@pytest.mark.parametrize('task', TASKS, ids=lambda task: task.name)
def test_inheritance_is_at_most_three_deep_and_imports_nothing(task):

    def depth(path):
        # A host's base counts as one file; tests/downstream holds that it inherits nothing.
        return 1 + max(map(depth, bases(path) if isinstance(path, Path) else []), default=0)

    for leaf in task.glob('*.py'):
        assert depth(leaf) <= 3, leaf
        assert 'import ' not in leaf.read_text(), leaf


@every_leaf
def test_name_says_the_model(name):
    field, backbone = fields(name), load(name).model.backbone
    mixer = build(name).backbone.layers[0].token_mixer

    assert backbone.type == 'aft_mm.AFTViT'
    assert backbone.token_mixer.type == MIXERS[field['family']]
    assert type(mixer).__name__ == MIXERS[field['family']].removeprefix('aft_mm.')
    if field['arch'] in DIMS:
        assert mixer.embed_dims == DIMS[field['arch']]
        assert len(build(name).backbone.layers) == 12
    if field['family'] == 'aft-conv' and field['arch'] != 'quickstart':
        assert mixer.num_heads == int(field['heads'])
        assert mixer.position_bias().shape == (mixer.num_heads, *2 * (int(field['kernel']),))


@every_leaf
def test_name_says_the_ablation(name):
    field, mixer = fields(name), load(name).model.backbone.token_mixer
    if field['what'] in ABLATIONS:
        assert ABLATIONS[field['what']].items() <= dict(mixer).items()
    else:
        assert field['what'] in (None, 'from-deit', 'pickle', 'test-only', 'deit3')
        sizes = {'type', 'rank', 'num_heads', 'kernel_size', 'key_dims'}
        assert mixer.get('rank', 128) and set(mixer) <= sizes
    assert bool(load(name).load_from) == (field['what'] == 'from-deit')


@every_leaf
def test_name_says_the_schedule(name):
    field, config = fields(name), load(name)
    assert config.train_dataloader.batch_size == int(field['batch'])
    assert config.train_cfg.max_epochs == int(field['epochs'])
    if field['data'] == 'in1k':
        total = int(field['gpus']) * int(field['batch'])
        assert config.auto_scale_lr.base_batch_size == total
        if field['what'] != 'deit3':
            assert config.optim_wrapper.optimizer.lr == pytest.approx(5e-4 * total / 512)
    else:
        assert int(field['gpus']) == 1


@every_leaf
def test_name_says_the_data(name, monkeypatch):
    field = fields(name)
    kind, folder, _, num_classes = DATA[field['data']]
    if field['what'] == 'pickle':
        kind = 'CIFAR10'
    monkeypatch.delenv('AFT_MM_DATA', raising=False)
    config = Config.fromfile(LEAVES[name])

    assert config.model.backbone.img_size == image_size(name)
    assert config.model.head.num_classes == config.data_preprocessor.num_classes == num_classes
    for loader in (config.train_dataloader, config.val_dataloader, config.test_dataloader):
        assert loader.dataset.type == kind
        assert loader.dataset.get('data_root') == (folder and f'data/{folder}')
        assert not loader.dataset.get('download', kind == 'CIFAR10')
        assert DATASETS.get(kind if '.' in kind else f'mmpretrain.{kind}')


@every_leaf
def test_pipelines_give_what_the_model_takes(name, tmp_path):
    config = load(name)
    init_default_scope(config.default_scope)
    rng = np.random.default_rng(0)
    for split in ('train', 'val', 'test'):
        loader = config[f'{split}_dataloader']
        trained_smaller = split == 'train' and fields(name)['what'] == 'test-only'
        size = 224 if trained_smaller else image_size(name)
        sample = dict(gt_label=3)
        if loader.dataset.type == 'ImageNet':
            path = tmp_path / 'image.JPEG'
            Image.fromarray(rng.integers(0, 256, (261, 307, 3), dtype=np.uint8)).save(path)
            sample['img_path'] = str(path)
        else:
            channels = config.model.backbone.get('in_channels', 3)
            sample['img'] = rng.integers(0, 256, (size, size, channels), dtype=np.uint8)
        packed = Compose(loader.dataset.pipeline)(sample)

        assert packed['inputs'].shape == (config.model.backbone.get('in_channels', 3), size, size)
        assert packed['inputs'].dtype == torch.uint8
        assert packed['data_samples'].gt_label.item() == 3


@every_leaf
def test_only_matrices_of_layers_are_decayed(name):
    model = build(name)
    groups = build_optim_wrapper(model, load(name).optim_wrapper).optimizer.param_groups
    decayed = {id(group['params'][0]): group['weight_decay'] for group in groups}

    assert len(decayed) == len(list(model.parameters()))
    for parameter_name, parameter in model.named_parameters():
        spared = parameter.ndim == 1 or re.search('pos_bias|pos_embed|cls_token', parameter_name)
        assert decayed[id(parameter)] == (0.0 if spared else 0.05), parameter_name


@every_leaf
def test_hooks_build(name):
    config = load(name)
    init_default_scope(config.default_scope)
    ours = [hook for hook in config.default_hooks.values() if hook.type.startswith('aft_mm.')]
    built = ours + config.get('custom_hooks', [])
    hooks = [type(HOOKS.build(hook)).__name__ for hook in built]
    what = fields(name)['what']

    # Truncated images stop a run, and a resumed run repeats the unkilled one.
    assert {'CheckImagesHook', 'EpochSeedHook'} <= set(hooks)
    assert not config.train_dataloader.persistent_workers

    assert ('EMAHook' in hooks) == (fields(name)['data'] == 'in1k')
    assert ('RegularizationHook' in hooks) == (what == 'entropy')


@pytest.mark.parametrize('name', [name for name in LEAVES if '_in1k' not in name])
def test_small_models_train(name):
    config, size = load(name), image_size(name)
    init_default_scope(config.default_scope)
    torch.manual_seed(0)
    model = MODELS.build(dict(config.model, data_preprocessor=dict(config.data_preprocessor)))
    shape = (config.model.backbone.get('in_channels', 3), size, size)
    sample = Compose([dict(type='PackInputs')])(
        dict(img=np.zeros((size, size, shape[0]), np.uint8), gt_label=3)
    )
    data = dict(
        inputs=torch.randint(0, 256, (2, *shape), dtype=torch.uint8),
        data_samples=[sample['data_samples']] * 2,
    )

    loss = model(**model.data_preprocessor(data, training=True), mode='loss')['loss']
    loss.backward()
    assert loss.item() == pytest.approx(math.log(10), abs=0.7)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def expected_parameters(name):
    """Weights of a model, added up by hand from the layout of a ViT and the mixer's options."""
    dims, grid = DIMS[fields(name)['arch']], (image_size(name) // 16) ** 2
    mixer = load(name).model.backbone.token_mixer
    linear = dims * dims + dims
    if mixer.type == 'aft_mm.AFTConv':
        heads = mixer.num_heads
        mixing = linear * (1 + mixer.get('query', True)) + (dims + 1) * heads
        mixing += heads * (mixer.kernel_size**2 + 2 * mixer.get('reparameterize', True))
        embedding = 0
    elif mixer.type == 'aft_mm.LambdaLayer':
        queries, keys = mixer.num_heads * mixer.key_dims, mixer.key_dims
        mixing = (dims + 2) * (queries + keys) + (dims + 1) * (dims // mixer.num_heads)
        mixing += (2 * int(grid**0.5) - 1) ** 2 * keys
        embedding = grid * dims
    else:
        tokens = 1 + grid
        mixing = 3 * linear
        if mixer.type == 'aft_mm.AFTFull':
            mixing += tokens**2 if mixer.rank is None else 2 * tokens * mixer.rank
        embedding = dims + tokens * dims
    block = mixing + linear + 2 * 2 * dims + 8 * dims * dims + 5 * dims
    return (3 * 256 + 1) * dims + embedding + 12 * block + 2 * dims + (dims + 1) * 1000


@pytest.mark.parametrize('name', [name for name in LEAVES if '_in1k' in name])
def test_parameters_are_those_of_the_layout(name):
    assert count(name) == expected_parameters(name)


@pytest.mark.parametrize(
    'model, millions',
    [
        ('deit-tiny', 5.7),
        ('deit-small', 22.1),
        ('lambda-tiny', 4.8),
        ('lambda-small', 17.7),
        ('aft-full-tiny', 6.3),
        ('aft-full-small', 22.6),
        ('aft-conv-tiny-h32-k11', 5.4),
        ('aft-conv-tiny-h192-k11', 5.9),
        ('aft-conv-small-h16-k11', 20.3),
        ('aft-conv-small-h384-k11', 22.5),
        ('aft-conv-small-h384-k15', 23.0),
    ],
)
def test_parameters_are_those_of_the_paper(model, millions):
    """Table 7, which sometimes rounds (22.05 to 22.1) and sometimes cuts off (5.96 to 5.9)."""
    counted = count(f'{model}_8xb128-300e_in1k') / 1e6
    assert millions in (round(counted, 1), math.floor(counted * 10) / 10)


def test_deit_base_has_the_parameters_of_table_8():
    assert round(count('deit-base_8xb8-100e_in1k-384px') / 1e6, 1) == 86.9


def test_models_of_table_8_differ_in_the_model_only():
    ours, theirs = (
        load(f'{model}_8xb8-100e_in1k-384px').to_dict()
        for model in ('aft-conv-base-h32-k25', 'deit-base')
    )
    assert ours.pop('model') != theirs.pop('model')
    assert ours == theirs


def test_a_model_trained_at_224_px_is_tested_at_384_px():
    name = 'aft-conv-small-h384-k15_8xb128-300e'
    torch.manual_seed(0)
    configs = [load(f'{name}_in1k'), load(f'{name}-test-only_in1k-384px')]
    init_default_scope(configs[0].default_scope)
    trained, tested = (
        MODELS.build(dict(config.model, data_preprocessor=dict(config.data_preprocessor))).eval()
        for config in configs
    )
    tested.load_state_dict(trained.state_dict(), strict=True)
    assert trained.backbone.grid == (14, 14) and tested.backbone.grid == (24, 24)

    image = torch.randn(1, 3, 384, 384)
    with torch.no_grad():
        torch.testing.assert_close(tested(image), trained(image))


def test_testing_at_384_px_is_as_in_training_at_384_px():
    tested, trained = (
        load(name)
        for name in (
            'aft-conv-small-h384-k15_8xb128-300e-test-only_in1k-384px',
            'aft-conv-base-h32-k25_8xb8-100e_in1k-384px',
        )
    )
    for key in ('val_dataloader', 'test_dataloader', 'tta_pipeline'):
        assert tested[key] == trained[key]


def test_the_sparsity_of_the_small_models_is_that_of_the_large_ones():
    small, large = (
        load(name)
        for name in (
            'aft-conv-mini-h96-k7_1xb50-40e-entropy_imagenette-64px',
            'aft-conv-small-h384-k11_8xb128-300e-entropy_in1k',
        )
    )
    assert small.custom_hooks == large.custom_hooks[1:]


@pytest.mark.parametrize('data', ['imagenette', 'cifar10'])
def test_mini_models_are_of_equal_size(data):
    sizes = {
        fields(name)['family']: count(name)
        for name in LEAVES
        if '-mini' in name and fields(name)['data'] == data
    }
    assert sizes.keys() == MIXERS.keys() - {'lambda'}
    assert max(sizes.values()) < 1.04 * min(sizes.values())


def count_any(path):
    """Parameters of the model of a leaf of any task."""
    config = Config.fromfile(path)
    init_default_scope(config.default_scope)
    with torch.device('meta'):
        return sum(parameter.numel() for parameter in MODELS.build(config.model).parameters())


def test_every_task_is_listed():
    tasks = {path.parent for path in ROOT.glob('configs/*/*.py')} - {
        ROOT / 'configs/_base_',
        ROOT / 'configs/own_data',
    }  # the latter have no results
    index = yaml.safe_load((ROOT / 'model-index.yml').read_text())
    assert tasks == set(TASKS)
    assert index['Import'] == [f'configs/{task.name}/metafile.yml' for task in TASKS]


@pytest.mark.parametrize('task', TASKS, ids=lambda task: task.name)
def test_metafile_lists_every_leaf_and_its_parameters(task):
    models = yaml.safe_load((task / 'metafile.yml').read_text())['Models']

    assert {ROOT / model['Config'] for model in models} == set(task.glob('*.py'))
    for model in models:
        path = ROOT / model['Config']
        assert path.stem == model['Name']
        if task.name not in DOWNSTREAM:  # counted by tests/downstream
            assert model['Metadata']['Parameters'] == count_any(path), path


@pytest.mark.parametrize('task', TASKS, ids=lambda task: task.name)
def test_readme_links_every_leaf(task):
    linked = re.findall(r'\(([\w.-]+)\.py\)', (task / 'README.md').read_text())
    assert set(linked) == {path.stem for path in task.glob('*.py')}
