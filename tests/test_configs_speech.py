"""Every leaf of speech recognition loads, builds, trains and says in its name what it is."""

import math
import re

import numpy as np
import pytest
import torch
from mmengine.dataset import Compose
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DATASETS, HOOKS, METRICS, MODELS, init_default_scope

from aft_mm.datasets.utterances import frames_needed
from aft_mm.tokenizers import TextUnits

from .leaves import build_leaf, leaves, load_leaf

LEAVES = leaves('speech_recognition')
NAME = re.compile(
    r'(?P<family>bi-lstm|transformer|linear|lsh-4|aft-simple|aft-local-(?P<window>\d+)|aft-full'
    r'|aft-conv)(?:-(?P<mini>mini)|-l(?P<layers>\d+)(?:-h(?P<heads>\d+))?|-h(?P<conv_heads>\d+))*'
    r'(?:-k(?P<kernel>\d+))?(?:-(?P<small>mini))?'
    r'_1xb(?P<batch>\d+)-(?P<epochs>\d+)e_(?P<data>wsj|librispeech-100|fsdd|an4-phonemes|an4-characters)'
)
MIXERS = {
    'transformer': 'SoftmaxAttention',
    'linear': 'LinearAttention',
    'lsh-4': 'LSHAttention',
    'aft-simple': 'AFTSimple',
    'aft-local': 'AFTLocal',
    'aft-full': 'AFTFull',
    'aft-conv': 'AFTConv',
}
# Data set, its folder, and what errors are counted in.
DATA = {
    'wsj': ('KaldiFeatures', 'wsj', ['phoneme']),
    'librispeech-100': ('SpeechFolder', 'librispeech', ['character', 'word']),
    'an4-phonemes': ('SphinxFeatures', 'an4_mfcc', ['phoneme']),
    'an4-characters': ('SphinxFeatures', 'an4_mfcc', ['character', 'word']),
    'fsdd': ('FSDD', 'fsdd', ['character', 'word']),
}
every_leaf = pytest.mark.parametrize('name', LEAVES)


def load(name):
    return load_leaf(LEAVES[name])


def fields(name):
    return NAME.fullmatch(name).groupdict()


@every_leaf
def test_name_says_model_schedule_and_data(name):
    field, config, model = fields(name), load(name), build_leaf(LEAVES[name])
    kind, folder, errors = DATA[field['data']]
    assert config.train_dataloader.batch_size == int(field['batch'])
    assert config.train_cfg.max_epochs == int(field['epochs'])
    for split in ('train', 'val', 'test'):
        dataset = config[f'{split}_dataloader'].dataset
        assert dataset.type == f'aft_mm.{kind}' and f'/{folder}' in dataset.data_root
        assert dataset.units == config.units
        assert bool(dataset.get('test_mode')) == (split != 'train')
    assert [METRICS.build(e).per for e in as_list(config.test_evaluator)] == errors
    assert as_list(config.val_evaluator) == as_list(config.test_evaluator)
    assert model.head.num_classes == len(TextUnits(**config.units).names)
    if field['family'] == 'bi-lstm':
        lstm = model.encoder.lstm
        assert lstm.num_layers == 3
        assert (lstm.hidden_size == 320) == (field['data'] == 'wsj')
        return
    mixer = model.encoder.layers[0].token_mixer
    assert type(mixer).__name__ == MIXERS[re.sub(r'(local)-\d+', r'\1', field['family'])]
    assert field['window'] is None or mixer.window == int(field['window'])
    if field['family'] == 'aft-conv':
        heads = field['heads'] or field['conv_heads']
        assert mixer.position_bias().shape == (int(heads), int(field['kernel']))
    elif field['heads'] is not None:
        assert mixer.num_heads == int(field['heads'])
    if field['layers']:
        assert len(model.encoder.layers) == int(field['layers'])


def as_list(evaluator):
    return evaluator if isinstance(evaluator, list) else [evaluator]


def test_the_protocol_is_that_of_the_paper():
    large = {name: load(name) for name in LEAVES if name.endswith('wsj')}
    assert len(large) == 8
    reference = None
    for name, config in large.items():
        config = config.to_dict()
        model, optimizer = config.pop('model'), config['optim_wrapper'].pop('optimizer')
        if 'bi-lstm' in name:
            assert optimizer == dict(type='Adam', lr=1e-3)
        else:
            assert optimizer == dict(type='RAdam', lr=1e-4)
            encoder = model['encoder']
            assert (encoder['embed_dims'], encoder['num_layers'], encoder['grid']) == (
                192,
                9,
                (2400,),
            )
            assert encoder['embedding']['num_features'] == 40
        assert reference in (None, config), name  # they differ in the model and its optimizer only
        reference = config
    (schedule,) = reference['param_scheduler']
    assert schedule['factor'] == 0.5 and schedule['rule'] == 'less'
    assert schedule['monitor'] == 'phoneme_error_rate'
    assert reference['train_dataloader']['dataset']['max_frames'] == 2400


def test_small_models_of_phonemes_are_of_like_size_and_differ_in_the_encoder_only():
    small = [name for name in LEAVES if name.endswith('an4-phonemes')]
    sizes = [sum(p.numel() for p in build_leaf(LEAVES[name]).parameters()) for name in small]
    assert len(sizes) == 7 and max(sizes) < 1.25 * min(sizes)
    rest = [load(name).to_dict() for name in small]
    for config in rest:
        del config['model']
    assert all(config == rest[0] for config in rest)


@every_leaf
def test_models_train_on_what_the_pipeline_gives(name, monkeypatch):
    config = load(name)
    init_default_scope(config.default_scope)
    torch.manual_seed(0)
    model = MODELS.build(config.model)
    (load_step, *steps) = config.train_dataloader.dataset.pipeline
    width = 13 if 'an4' in name else load_step.num_mel_bins
    steps = [step for step in steps if step.type != 'aft_mm.SpecAugment']
    rng = np.random.default_rng(0)
    units = [(5, 5, 4), (3,)]
    samples = [
        Compose(steps)(
            dict(features=rng.standard_normal((length, width)).astype('f4'), name='a', units=target)
        )
        for length, target in zip((47, 20), units, strict=True)
    ]
    batch = {key: [sample[key] for sample in samples] for key in samples[0]}
    batch = model.data_preprocessor(batch, training=True)
    loss = model(**batch, mode='loss')['loss']
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    # At the start every unit is about as likely in each frame as any other.
    classes = torch.full((2, batch['inputs'].shape[1], model.head.num_classes), 0.0)
    lengths = [sample.length for sample in batch['data_samples']]
    uniform = model.head.nats(classes.log_softmax(-1), lengths, units).sum() / sum(map(len, units))
    assert loss.item() == pytest.approx(uniform.item(), rel=0.15)
    assert all(frames_needed(u) <= n for u, n in zip(units, lengths, strict=True))
    assert math.isfinite(model(**batch, mode='predict')[0].score)


def test_optimizers_and_hooks_build():
    for name in ('linear-l9-h6_1xb16-100e_wsj', 'aft-full-mini_1xb8-25e_an4-phonemes'):
        config, model = load(name), build_leaf(LEAVES[name])
        wrapper = build_optim_wrapper(model, config.optim_wrapper)
        spared = {'position_embedding', 'pos_bias', 'norm', 'bias'}
        decays = {group['weight_decay'] for group in wrapper.optimizer.param_groups}
        if 'mini' in name:
            assert decays == {0.0, 0.05}
            for group, (key, _) in zip(
                wrapper.optimizer.param_groups, model.named_parameters(), strict=True
            ):
                assert (group['weight_decay'] == 0) == any(part in key for part in spared), key
        hooks = [HOOKS.build(hook) for hook in config.custom_hooks]
        assert [type(hook).__name__ for hook in hooks] == ['DataReportHook', 'EpochTimeHook']
        assert not config.train_dataloader.persistent_workers


@pytest.mark.parametrize(
    'name', [name for name in LEAVES if name.startswith('aft-conv') and '-100e_' not in name]
)
def test_real_data_can_be_trained_on_whole(name, shared_data, monkeypatch):
    pytest.importorskip('soundfile', reason='soundfile reads the headers of sound')
    monkeypatch.setenv('AFT_MM_DATA', str(shared_data))
    folder = DATA[fields(name)['data']][1]
    if not (shared_data / folder).is_dir():
        pytest.skip(f'the pack {folder} is not at {shared_data}')
    config = load_leaf.__wrapped__(LEAVES[name])
    init_default_scope(config.default_scope)
    for split, number in (
        ('train', 200 if folder == 'fsdd' else 518),
        ('test', 250 if folder == 'fsdd' else 78),
    ):
        dataset = config[f'{split}_dataloader'].dataset
        # Statistics of speakers would read every file.
        dataset.pipeline = [s for s in dataset.pipeline if s.type != 'aft_mm.NormalizeFeatures']
        data = DATASETS.build(dataset)
        infos = [data.get_data_info(i) for i in range(len(data))]
        assert len(data) == number and not any(1 in info['units'] for info in infos)
        assert data.lengths.max() <= config.model.encoder.grid[0]
        assert all(frames_needed(i['units']) <= i['num_frames'] for i in infos)
