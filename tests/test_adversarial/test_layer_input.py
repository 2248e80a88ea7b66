"""Bad arguments of layers and models raise one-line errors that name the argument."""

import numpy as np
import pytest
import torch
from mmengine.registry import MODELS

from ..errors import refuses_value
from ..generation_models import stack
from ..helpers import each, short

pytestmark = pytest.mark.adversarial

D = 8
TOKENS = torch.randn(2, 6, D)
EMBEDDING = dict(type='aft_mm.TokenEmbedding', vocab_size=16)
DECODER = stack('SequenceDecoder', grid=(6,), embedding=EMBEDDING)
HEAD = dict(type='aft_mm.CategoricalHead', embed_dims=D, num_classes=16)


def pairs(arguments):
    return [(name, value) for name, values in arguments.items() for value in values]


# Wrong types; values out of range are in tests/test_layers/test_mixer_arguments.py.
CONV, LOCAL = dict(num_heads=4, kernel_size=3), dict(num_heads=2, window=2)
WRONG = {
    'AFTConv': dict(
        num_heads=(4.0, '4', -4, None, True, [4]),
        kernel_size=(3.0, None, '3', 0, (), [3.0], np.int64(3)),
        proj_drop=('a', 2.0, -0.1, float('nan'), None, True),
        qkv_bias=('no',),
        causal=('no',),
        query=('no',),
        reparameterize=('no',),
        global_connectivity=('no',),
    ),
    'AFTFull': dict(rank=('a', 1.5, True, [1]), init_std=('a', -1, float('nan'), float('inf'))),
    'AFTLocal': dict(window=(2.5, '2', None, [], {})),
    'AFTLocalHard': dict(window=('2', None, (2, 2), [], {})),
    'AFTSimple': dict(
        embed_dims=(8.0, '8', None, -8, True),
        grid=(6, '6', ('6',), (6.0,), (), torch.ones(1)),
        num_prefix_tokens=(1.0, 'a'),
        gate=(1, ['sigmoid']),
    ),
    'LocalSoftmaxAttention': dict(window=(2.0,), margin=(-1,)),
}
MIXERS = [(kind, *pair) for kind, arguments in WRONG.items() for pair in pairs(arguments)]


@each('kind, name, value', MIXERS)
def test_arguments_of_a_mixer(kind, name, value):
    needed = dict(AFTConv=CONV, LocalSoftmaxAttention=LOCAL).get(kind, {})
    config = dict(type=f'aft_mm.{kind}', embed_dims=D, grid=(6,)) | needed | {name: value}
    refuses_value(name, MODELS.build, config)


STEPPING = [
    dict(type='aft_mm.AFTSimple'),
    dict(type='aft_mm.SoftmaxAttention', num_heads=2),
    dict(type='aft_mm.AFTFull'),
    dict(type='aft_mm.AFTLocalHard', window=2),
    dict(type='aft_mm.LocalSoftmaxAttention', **LOCAL),
]


@each(
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
)
@each('mixer', STEPPING[:2])
def test_input_tokens_of_a_mixer(mixer, tokens):
    mixer = MODELS.build(dict(mixer, embed_dims=D, grid=(6,), causal=True))
    refuses_value('x', mixer, tokens)
    refuses_value('x_t', mixer.step, tokens, mixer.init_state(2))


@pytest.mark.parametrize('mixer', STEPPING, ids=lambda config: config['type'])
def test_input_states_of_a_mixer(mixer):
    mixer = MODELS.build(dict(mixer, embed_dims=D, grid=(6,), causal=True))
    state = mixer.init_state(2)
    for wrong in (None, 'state', (1, 2)):
        refuses_value('state', mixer.step, TOKENS[:, 0], wrong)
    _, later = mixer.step(TOKENS[:, 0], state)
    refuses_value('state', mixer.step, TOKENS[:, 1], state)  # its buffers were overwritten
    mixer.step(TOKENS[:, 1], later)


BACKBONE = dict(
    type='aft_mm.AFTViT', arch=dict(embed_dims=8, num_layers=1), img_size=8, patch_size=4
)
VIT = dict(
    arch=(5, dict(embed_dims=8, num_layers=1.0), dict(embed_dims=8, num_layers=1, mlp_ratio='4')),
    img_size=('32', (32,), 32.0, 0, (32, -1), None),
    patch_size=(2.5, '2', 0),
    out_indices=('all', 1.0, None),
    token_mixer=('aft_mm.AFTConv', dict(num_heads=4), [], 5),
    drop_rate=(2, -1, 'a'),
    drop_path_rate=(2.0, -1.0, None),
    in_channels=(0,),
    frozen_stages=('all',),
    with_cls_token=('yes',),
    final_norm=(1,),
)


@each('name, value', pairs(VIT))
def test_arguments_of_the_backbone(name, value):
    refuses_value(name, MODELS.build, BACKBONE | {name: value})


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
    backbone = MODELS.build(BACKBONE)
    refuses_value('image', backbone, image)


PARTS = [
    *[
        (dict(decoder=dict(DECODER, **{name: value})), name)
        for name, value in dict(
            num_layers=0,
            embed_dims=8.0,
            drop_rate=3.0,
            mlp_ratio='a',
            tokens_per_position=4,
            with_cp='no',
            token_mixer='aft_mm.AFTSimple',
            embedding=None,
            cross_mixer='softmax',
        ).items()
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
    refuses_value(name, model, **parts)


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
    refuses_value(name, model(), inputs)


# Wrong types; values out of range are in tests/test_models/test_generation.py.
SAMPLING = dict(
    length=(True,),
    temperature=('a', float('nan'), None),
    prompts=('ab', 5, [['a']], [torch.zeros(2, 2).long()], [None]),
    batch_size=(1.5, '2', True),
    top_p=('a',),
    greedy=('no',),
    use_state=(2,),
)


@pytest.mark.parametrize('name, value', pairs(SAMPLING), ids=short)
def test_options_of_sampling(name, value):
    refuses_value(name, model().generate, **{'length': 5, name: value})


@pytest.mark.parametrize('greedy', [False, True])
def test_a_model_with_nan_weights_does_not_sample(greedy):
    damaged = model()
    with torch.no_grad():
        damaged.head.weight.fill_(torch.nan)
    refuses_value('logits', damaged.generate, 5, greedy=greedy)
