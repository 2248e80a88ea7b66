"""Bad arguments of layers and models raise one-line errors that name the argument."""

import numpy as np
import pytest
import torch
from mmengine.registry import MODELS

from .names import short

pytestmark = pytest.mark.adversarial

D = 8
TOKENS = torch.randn(2, 6, D)
DECODER = dict(
    type='aft_mm.SequenceDecoder',
    embed_dims=D,
    num_layers=1,
    grid=(6,),
    embedding=dict(type='aft_mm.TokenEmbedding', vocab_size=16),
    token_mixer=dict(type='aft_mm.AFTSimple'),
)
HEAD = dict(type='aft_mm.CategoricalHead', embed_dims=D, num_classes=16)


def assert_error(call, name):
    with pytest.raises(ValueError, match=f'^{name}.* must ') as error:
        call()
    assert '\n' not in str(error.value)
    assert len(str(error.value)) < 300


MIXERS = [
    *[
        (dict(type='AFTConv', num_heads=heads, kernel_size=3), 'num_heads')
        for heads in (4.0, '4', 0, -4, None, True, [4])
    ],
    *[
        (dict(type='AFTConv', num_heads=4, kernel_size=size), 'kernel_size')
        for size in (3.0, None, '3', 2, 0, (3, 3), (), [3.0], np.int64(3))
    ],
    *[
        (dict(type='AFTConv', num_heads=4, kernel_size=3, proj_drop=drop), 'proj_drop')
        for drop in ('a', 2.0, -0.1, float('nan'), None, True)
    ],
    *[
        (dict(type='AFTConv', num_heads=4, kernel_size=3, **{name: 'no'}), name)
        for name in ('qkv_bias', 'causal', 'query', 'reparameterize', 'global_connectivity')
    ],
    *[(dict(type='AFTFull', rank=rank), 'rank') for rank in ('a', 1.5, 0, True, [1])],
    *[
        (dict(type='AFTFull', init_std=std), 'init_std')
        for std in ('a', -1, float('nan'), float('inf'))
    ],
    *[
        (dict(type=kind, window=window), 'window')
        for kind in ('AFTLocal', 'AFTLocalHard')
        for window in (2.5, '2', None, -1, (2, 2), [], {})
    ],
    *[
        (dict(type='AFTSimple', embed_dims=dims), 'embed_dims')
        for dims in (8.0, '8', None, 0, -8, True)
    ],
    *[
        (dict(type='AFTSimple', grid=grid), 'grid')
        for grid in (6, '6', ('6',), (6.0,), (), (0,), (1, 1, 1, 6), torch.ones(1))
    ],
    *[
        (dict(type='AFTSimple', num_prefix_tokens=number), 'num_prefix_tokens')
        for number in (-1, 1.0, 'a')
    ],
    *[(dict(type='AFTSimple', gate=gate), 'gate') for gate in ('tanh', 1, ['sigmoid'])],
    (dict(type='AFTSimple', key_function='elu'), 'key_function'),
    (dict(type='LocalSoftmaxAttention', num_heads=2, window=2.0), 'window'),
    (dict(type='LocalSoftmaxAttention', num_heads=2, window=2, margin=-1), 'margin'),
]


@pytest.mark.parametrize('config, name', MIXERS, ids=short)
def test_arguments_of_a_mixer(config, name):
    config = {'embed_dims': D, 'grid': (6,), **config, 'type': f'aft_mm.{config["type"]}'}
    assert_error(lambda: MODELS.build(config), name)


@pytest.mark.parametrize(
    'tokens',
    [
        None,
        [[1.0]],
        'x',
        np.zeros((2, 6, D)),
        TOKENS[0],
        TOKENS[..., :7],
        TOKENS.long(),
        TOKENS.bool(),
        TOKENS.to(torch.complex64),
        TOKENS.to(torch.float8_e4m3fn),
    ],
    ids=lambda x: type(x).__name__ + str(getattr(x, 'dtype', '')),
)
@pytest.mark.parametrize(
    'mixer',
    [
        dict(type='aft_mm.AFTSimple'),
        dict(type='aft_mm.SoftmaxAttention', num_heads=2),
    ],
    ids=lambda config: config['type'],
)
def test_input_tokens_of_a_mixer(mixer, tokens):
    mixer = MODELS.build(dict(mixer, embed_dims=D, grid=(6,), causal=True))
    assert_error(lambda: mixer(tokens), 'x')
    assert_error(lambda: mixer.step(tokens, mixer.init_state(2)), 'x_t')


@pytest.mark.parametrize(
    'mixer',
    [
        dict(type='aft_mm.AFTSimple'),
        dict(type='aft_mm.AFTFull'),
        dict(type='aft_mm.AFTLocalHard', window=2),
        dict(type='aft_mm.SoftmaxAttention', num_heads=2),
        dict(type='aft_mm.LocalSoftmaxAttention', num_heads=2, window=2),
    ],
    ids=lambda config: config['type'],
)
def test_input_states_of_a_mixer(mixer):
    mixer = MODELS.build(dict(mixer, embed_dims=D, grid=(6,), causal=True))
    state = mixer.init_state(2)
    for wrong in (None, 'state', (1, 2)):
        assert_error(lambda wrong=wrong: mixer.step(TOKENS[:, 0], wrong), 'state')
    _, later = mixer.step(TOKENS[:, 0], state)
    assert_error(lambda: mixer.step(TOKENS[:, 1], state), 'state')  # its buffers were overwritten
    mixer.step(TOKENS[:, 1], later)


VIT = [
    *[
        (dict(arch=arch), 'arch')
        for arch in (
            5,
            'huge',
            {},
            dict(embed_dims=-8, num_layers=1),
            dict(embed_dims=8, num_layers=1.0),
            dict(embed_dims=8, num_layers=1, mlp_ratio='4'),
        )
    ],
    *[(dict(img_size=size), 'img_size') for size in ('32', (32,), 32.0, 0, (32, -1), None)],
    *[(dict(patch_size=size), 'patch_size') for size in (2.5, '2', 0)],
    *[(dict(out_indices=indices), 'out_indices') for indices in ('all', 1.0, (), 7, None)],
    *[
        (dict(token_mixer=mixer), 'token_mixer')
        for mixer in ('aft_mm.AFTConv', dict(num_heads=4), [], 5)
    ],
    *[(dict(drop_rate=rate), 'drop_rate') for rate in (2, -1, 'a')],
    *[(dict(drop_path_rate=rate), 'drop_path_rate') for rate in (2.0, -1.0, None)],
    (dict(in_channels=0), 'in_channels'),
    (dict(frozen_stages='all'), 'frozen_stages'),
    (dict(with_cls_token='yes'), 'with_cls_token'),
    (dict(final_norm=1), 'final_norm'),
]


@pytest.mark.parametrize('options, name', VIT, ids=short)
def test_arguments_of_the_backbone(options, name):
    config = (
        dict(
            type='aft_mm.AFTViT',
            arch=dict(embed_dims=8, num_layers=1),
            img_size=8,
            patch_size=4,
            **{},
        )
        | options
    )
    assert_error(lambda: MODELS.build(config), name)


@pytest.mark.parametrize(
    'image',
    [
        None,
        'x',
        torch.zeros(2, 3, 8, 8, dtype=torch.uint8),
        torch.zeros(2, 1, 8, 8),
        torch.zeros(3, 8, 8),
        torch.zeros(2, 3, 0, 0),
        np.zeros((2, 3, 8, 8)),
    ],
    ids=lambda x: f'{type(x).__name__}{list(getattr(x, "shape", []))}',
)
def test_input_images_of_the_backbone(image):
    config = dict(arch=dict(embed_dims=8, num_layers=1), img_size=8, patch_size=4)
    backbone = MODELS.build(dict(type='aft_mm.AFTViT', **config))
    assert_error(lambda: backbone(image), 'image')


PARTS = [
    *[
        (dict(decoder=dict(DECODER, **{name: value})), name)
        for name, value in (
            ('num_layers', 0),
            ('num_layers', '2'),
            ('embed_dims', 8.0),
            ('drop_rate', 3.0),
            ('mlp_ratio', 'a'),
            ('mlp_ratio', 0),
            ('tokens_per_position', 4),
            ('with_cp', 'no'),
            ('token_mixer', 'aft_mm.AFTSimple'),
            ('embedding', None),
            ('cross_mixer', 'softmax'),
        )
    ],
    (dict(decoder=None), 'decoder'),
    (dict(head='aft_mm.CategoricalHead'), 'head'),
    (dict(encoder=3), 'encoder'),
    (dict(head=dict(HEAD, num_classes=16.0)), 'num_classes'),
    (dict(head=dict(HEAD, tied='yes')), 'tied'),
    (dict(head=dict(HEAD, num_classes=15)), 'head'),
]


def model(**parts):
    return MODELS.build(dict(type='aft_mm.AutoregressiveModel', decoder=DECODER, head=HEAD) | parts)


@pytest.mark.parametrize('parts, name', PARTS, ids=short)
def test_parts_of_the_autoregressive_model(parts, name):
    assert_error(lambda: model(**parts), name)


@pytest.mark.parametrize(
    'inputs, name',
    [
        (None, 'inputs'),
        ('ab', 'inputs'),
        (torch.zeros(6, dtype=torch.long), 'inputs'),
        (torch.zeros(2, 6), 'a token'),
        (torch.zeros(2, 6, dtype=torch.bool), 'a token'),
        (torch.full((2, 6), 16), 'a token'),
        (torch.full((2, 6), -1), 'a token'),
    ],
    ids=short,
)
def test_input_tokens_of_the_autoregressive_model(inputs, name):
    assert_error(lambda: model()(inputs), name)


@pytest.mark.parametrize(
    'options, name',
    [
        *[(dict(length=length), 'length') for length in (0, -1, 5.0, '5', None, True)],
        *[(dict(temperature=value), 'temperature') for value in ('a', 0, -1, float('nan'), None)],
        *[
            (dict(prompts=prompts), 'prompts')
            for prompts in (
                'ab',
                5,
                [['a']],
                [[1.5]],
                [[]],
                [[1] * 9],
                [torch.zeros(2, 2).long()],
                [None],
            )
        ],
        *[(dict(batch_size=size), 'batch_size') for size in (1.5, 0, '2', True)],
        *[(dict(top_k=value), 'top_k') for value in (0, 1.5, 'a')],
        *[(dict(top_p=value), 'top_p') for value in (0, 2, 'a')],
        *[(dict(seed=value), 'seed') for value in (-1, 1.5, 'a', 2**63)],
        (dict(greedy='no'), 'greedy'),
        (dict(use_state=2), 'use_state'),
    ],
    ids=short,
)
def test_options_of_sampling(options, name):
    assert_error(lambda: model().generate(**{'length': 5, **options}), name)


@pytest.mark.parametrize('greedy', [False, True])
def test_a_model_with_nan_weights_does_not_sample(greedy):
    damaged = model()
    with torch.no_grad():
        damaged.head.weight.fill_(torch.nan)
    assert_error(lambda: damaged.generate(5, greedy=greedy), 'logits')
