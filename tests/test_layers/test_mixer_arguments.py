"""Bad arguments and inputs of mixers raise one-line errors that name the argument."""

import math

import numpy as np
import pytest
import torch

from ..errors import refuses, refuses_value
from ..helpers import each
from .mixer_cases import MIXERS, ONE_DIMENSIONAL, D, build, tokens

# The mixer, arguments other than its `example`, and the error.
BAD = [
    ('AFTFull', dict(rank=0), 'rank must be .*, got 0'),
    ('AFTFull', dict(grid=None), 'grid must be given for AFTFull, got None'),
    ('AFTFull', dict(grid=(0, 3)), r'grid must be .* ints, 1 or larger, got \(0, 3\)'),
    ('AFTFull', dict(grid=(2, 2, 2, 2)), 'grid must be .* ints, 1 or larger'),
    ('AFTFull', dict(gate='tan'), "gate must be none, sigmoid, .* got 'tan'"),
    ('AFTFull', dict(gate={}), 'gate must be a dict with a type, .* got {}'),
    ('AFTFull', dict(num_prefix_tokens=-1), 'must be an int, 0 or larger'),
    ('AFTFull', dict(embed_dims=0), 'embed_dims must be an int, 1 or larger, got 0'),
    ('AFTSimple', dict(key_function='exp'), "key_function must be one .* got 'exp'"),
    ('AFTSimple-relu2', dict(gate='sigmoid'), "gate must be 'relu' for .*='relu2', got 'sigmoid'"),
    ('AFTLocal', dict(window=-1), 'window must be .* ints, 0 or larger, got -1'),
    ('AFTLocal', dict(window=(1, 2, 3)), 'window must be an int or 2 ints'),
    ('AFTLocal', dict(rank=None), r'1 dimension for a free .* got \(3, 4\)'),
    ('AFTLocal', dict(window=0, rank=None, grid=(4,)), 'window must be 1 or .* got 0'),
    ('AFTLocal', dict(rank=0), 'rank must be .*, got 0'),
    ('AFTLocal', dict(grid=None), 'grid must have 1 or 2 dimensions .* None'),
    ('AFTLocal', dict(num_prefix_tokens=1), 'must be 0 for AFTLocal, got 1'),
    ('AFTLocal', dict(window=True), 'window must be an int or .* got True'),
    ('AFTLocalLearned', dict(window=-1), 'window must be .* ints, 0 or larger, got -1'),
    ('AFTLocalHard', dict(window=3), 'window must be even .* got 3'),
    ('AFTLocalHard', dict(window=2.5), 'window must be an int or .* got 2.5'),
    ('AFTLocalHard', dict(window=0, grid=(4,)), 'window must be an int, 1 or larger, got 0'),
    ('AFTConv', dict(kernel_size=4), r'must be odd, got \(4, 4\)'),
    ('AFTConv', dict(kernel_size=(3,)), r'or 2 ints, .* got \(3,\)'),
    ('AFTConv', dict(num_prefix_tokens=1), 'num_prefix_tokens must be 0 for AFTConv, got 1'),
    ('AFTConv', dict(grid=None, kernel_size=(3,) * 4), r'kernel_size must be 1 to 3 ints, got \(3'),
    ('AFTConv', dict(query=False, gate='relu'), "gate must be left at its .* got 'relu'"),
    ('AFTLocalHard', dict(grid=(2, 2, 2)), 'grid must have 1 or 2 dimensions for AFTLocalHard'),
    ('LSTM', dict(embed_dims=7), 'embed_dims must be even for an LSTM .*, got 7'),
    ('AFTConv', dict(sparsity='l1'), "sparsity must be one of none, entropy, gumbel, got 'l1'"),
    *[
        ('AFTConv', dict(sparsity='gumbel', tau=tau), f'tau must be a .* above 0, got {tau!r}')
        for tau in (0, -0.5, math.inf, math.nan, 'soft')
    ],
    *[
        ('AFTConv', dict(sparsity=name, tau=0.5), f"at its default with sparsity='{name}', got 0.5")
        for name in ('none', 'entropy')
    ],
    *[
        (name, dict(num_heads=5), 'num_heads .*divides embed_dims=12, got 5')
        for name, example in MIXERS.items()
        if '-' not in name and 'num_heads' in example
    ],
    ('LocalSoftmaxAttention', dict(window=0), 'window must be .* 1 or .* 0'),
    ('LocalSoftmaxAttention', dict(window=(2, 2), grid=(9,)), r'window must be .*, got \(2, 2\)'),
    ('LocalSoftmaxAttention', dict(margin=(1, -1)), r'margin must be .*, 0 or .*, got \(1, -1\)'),
    ('LocalSoftmaxAttention', dict(grid=(2, 2, 2)), 'grid must have 1 or 2 dimensions for Local'),
    ('LinearAttention', dict(feature_map='tanh'), 'one of elu, relu, square, got .tanh'),
    ('PerformerAttention', dict(num_features=0), 'num_features must be an int, 1 .* got 0'),
    ('PerformerAttention', dict(redraw=0), 'redraw must be an int, 1 or larger, got 0'),
    ('DenseSynthesizer', dict(grid=None), 'grid must be given for DenseSynthesizer, got None'),
    ('LambdaLayer', dict(causal=True), 'causal must be False .* got True'),
    ('LambdaLayer', dict(grid=None), 'grid must be given for LambdaLayer'),
    ('LambdaLayer', dict(key_dims=0), 'key_dims must be an int, 1 .* got 0'),
    ('LSHAttention', dict(num_buckets=3), 'num_buckets must be 1 or even and positive, got 3'),
    ('LSHAttention', dict(chunk_size=0), 'chunk_size must be an int, 1 .* got 0'),
    ('LSHAttention', dict(num_rounds=0), 'num_rounds must be an int, 1 .* got 0'),
    ('StridedAttention', dict(stride=0), 'stride must be an int, 1 .* got 0'),
    ('StridedAttention', dict(pattern='local'), "one of strided, fixed, got 'local'"),
    *[
        (
            'StridedAttention',
            wrong,
            r"summary must be 1 to stride=3 for pattern='fixed' and None for 'strided', got",
        )
        for wrong in (dict(summary=1), dict(pattern='fixed'), dict(pattern='fixed', summary=5))
    ],
    ('StridedAttention', dict(qk_dims=10), 'qk_dims must be a multiple of num_heads=3, got 10'),
]


@each('name, wrong, message', BAD)
def test_bad_arguments_raise_a_one_line_error(name, wrong, message):
    refuses(message, build, name, **{'grid': (3, 4), **wrong})


# Values of another type, or of no meaning for any mixer.
WRONG = {
    'AFTConv': dict(
        num_heads=(4.0, '4', -4, None, True, [4]),
        kernel_size=(3.0, None, '3', 0, (), [3.0], np.int64(3)),
        proj_drop=('a', 2.0, -0.1, math.nan, None, True),
        qkv_bias=('no',),
        causal=('no',),
        query=('no',),
        reparameterize=('no',),
        global_connectivity=('no',),
    ),
    'AFTFull': dict(rank=('a', 1.5, True, [1]), init_std=('a', -1, math.nan, math.inf)),
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


@each('name, wrong', WRONG.items())
def test_values_of_another_type_are_refused(name, wrong):
    for argument, values in wrong.items():
        for value in values:
            refuses_value(argument, build, name, **{'grid': (6,), argument: value})


X = torch.randn(2, 6, D)


@each('name', ['AFTSimple', 'SoftmaxAttention'])
@each(
    'wrong',
    [
        *(None, [[1.0]], 'x', np.zeros((2, 6, D)), X[0], X[..., :7], X.long(), X.bool()),
        *(X.to(torch.complex64), X.to(torch.float8_e4m3fn)),
    ],
)
def test_what_are_no_tokens_is_refused(name, wrong):
    mixer = build(name, (6,), causal=True)
    refuses_value('x', mixer, wrong)
    refuses_value('x_t', mixer.step, wrong, mixer.init_state(2))


@each('name', MIXERS)
def test_an_unknown_argument_is_named(name):
    with pytest.raises(TypeError, match=r"has no argument 'widnow', only embed_dims, .*grid"):
        build(name, widnow=3)


@pytest.mark.parametrize('name', ['AFTLocal', 'AFTLocalLearned', 'AFTConv', 'AFTLocalHard'])
def test_bad_inputs_raise_a_one_line_error(name):
    mixer, x = build(name, (3, 5), causal=False), tokens((3, 5))
    refuses(r'grid must hold 14 tokens .* got \(3, 5\)', mixer, x[:, 1:])
    refuses(r'grid must hold 15 tokens .* got \(2, 7\)', mixer, x, grid=(2, 7))
    message = r'key_mask must be bool \[2, 15\] .*float32 \[2, 14\]'
    refuses(message, mixer, x, key_mask=torch.ones(2, 14))
    refuses(r'memory must be None for AFT\w+ .* got \[2, 15, 12\]', mixer, x, memory=x)
    refuses('causal must be True for steps of AFT', mixer.init_state, 1)


def test_an_image_for_tokens_names_the_way_to_these():
    mixer, image = build('AFTSimple'), torch.randn(2, D, 1, 7)
    refuses(r'x must be .* of an image x.flatten\(2\).mT, got .*1, 7\]', mixer, image)
    assert mixer(image.flatten(2).mT).shape == (2, 7, D)


@pytest.mark.filterwarnings('ignore:The PyTorch API of nested tensors')
def test_nested_and_sparse_tokens_are_refused():
    mixer, parts = build('AFTSimple', causal=True), [torch.randn(3, D), torch.randn(2, D)]
    for layout in (torch.strided, torch.jagged):
        x = torch.nested.nested_tensor(parts, layout=layout)
        message = 'must be dense, such as .* with cu_seqlens, got a nested tensor'
        refuses(f'x {message}', mixer, x)
        refuses(f'x {message}', mixer.prefill, x, torch.tensor([3, 2]))
        refuses(f'memory {message}', build('AFTSimple'), tokens((7,)), memory=x)
    x = torch.randn(2, D).to_sparse()
    refuses('x_t must be dense, got a sparse', mixer.step, x, mixer.init_state(2))


@each('name', MIXERS)
def test_no_tokens_are_refused(name):
    mixer, x = build(name), tokens((7,))
    refuses('x must have 1 or more tokens, got 0', mixer, x[:, :0])
    if mixer.takes_memory:
        refuses('memory must have 1 or more tokens, got 0', mixer, x, memory=x[:, :0])
    if mixer.takes_prefix_tokens and name not in ONE_DIMENSIONAL:
        mixer = build(name, num_prefix_tokens=1)
        refuses('x must have 1 or more tokens after 1 prefix tokens, got 0', mixer, x[:, :1])


def test_memory_grid_and_lengths_are_checked():
    x = tokens((7,))
    message = 'memory must be None for AFTSimple'
    refuses(f'{message} with causal=True', build('AFTSimple', causal=True), x, memory=x)
    refuses(message, build('AFTSimple', gate='none'), x, memory=x)
    message = (
        r"grid must fit positions learned on grid \(7,\), got \(8,\); .* longer='interpolate'$"
    )
    refuses(message, build('AFTFull'), torch.randn(1, 8, D))
    refuses(message, build('AFTLocal'), torch.randn(1, 8, D))
    message = r'grid must fit positions learned on grid \(7,\), got \(2, 4\)$'
    refuses(message, build('AFTFull'), torch.randn(1, 8, D), grid=(2, 4))
    mixer = build('AFTConv', grid=None, causal=True)
    refuses('grid must be given for AFTConv to take steps, got None', mixer.init_state, 1)
    for name in ('AFTSimple', 'SoftmaxAttention', 'LSTM', 'DenseSynthesizer'):
        mixer = build(name, causal=True)
        for wrong in ([1, 2, 3], [-1, 3], [8, 3]):
            message = rf'lengths must be 2 ints of 0 to 7, got \{wrong}'
            refuses(message, mixer.prefill, x, torch.tensor(wrong))
        refuses('lengths must be a tensor of ints', mixer.prefill, x, torch.tensor([1.0, 2.0]))
    mixer = build('AFTSimple', (2, 2), causal=True)
    message = 'x must have at most 4 tokens, got 7'
    refuses(message, mixer.prefill, x, torch.tensor([7, 7]))
    mixer = build('AFTLocalHard', None, causal=True, window=2)
    message = r'grid must be given to the .* got \(3, 5\) for these'
    refuses(message, mixer, tokens((3, 5)), grid=(3, 5))


@pytest.mark.parametrize('name', ['AFTConv', 'AFTFull', 'AFTLocal', 'DenseSynthesizer'])
def test_steps_beyond_the_grid_name_a_longer_one(name):
    mixer, x = build(name, causal=True), torch.randn(2, 8, D)
    _, state = mixer.prefill(x[:, :7], torch.tensor([7, 3]))
    message = 'state must hold at most 7 tokens, got one more; .* build it with a longer one'
    refuses(message, mixer.step, x[:, 7], state)


WITH_TABLE = ['DenseSynthesizer', 'LSHAttention', 'StridedAttention', 'SoftmaxAttention-stateless']


@pytest.mark.parametrize('name', WITH_TABLE)
def test_a_prompt_or_token_beyond_the_table_is_refused(name):
    mixer, x = build(name, causal=True), torch.randn(2, 8, D)
    if name != 'DenseSynthesizer':  # its weights limit the length first
        message = 'a prompt must have at most 7 tokens, got 8'
        refuses(message, mixer.prefill, x, torch.tensor([8, 3]))
        mixer_without_grid = build(name, None, causal=True)
        refuses('grid must be given .* got None', mixer_without_grid.init_state, 1)
    _, state = mixer.prefill(x[:, :7], torch.tensor([7, 3]))
    refuses('state must hold at most 7 tokens, got one more', mixer.step, x[:, 7], state)


@pytest.mark.parametrize('name', ['DenseSynthesizer', 'LambdaLayer'])
def test_a_grid_larger_than_the_learned_one_is_refused(name):
    refuses(r'grid must be .*\(7,\).* got \(8,\)', build(name), torch.randn(1, 8, D))


def test_a_state_of_another_mixer_or_batch_is_refused():
    x, linear = torch.randn(2, D), build('LinearAttention', causal=True)
    table = build('DenseSynthesizer', causal=True).init_state(2)
    refuses('of this LinearAttention, got TokenTable', linear.step, x, table)
    for name in (*WITH_TABLE, 'AFTFull', 'AFTSimple', 'SoftmaxAttention'):
        mixer = build(name, causal=True)
        refuses(r'x_t must be \[3, 12\] as the state', mixer.step, x, mixer.init_state(3))
        refuses(r'of this \w+, got LinearState', mixer.step, x, linear.init_state(2))


STEPPING = ['AFTSimple', 'SoftmaxAttention', 'AFTFull', 'AFTLocalHard', 'LocalSoftmaxAttention']


@each('name', STEPPING)
def test_no_state_and_one_whose_buffers_were_overwritten_are_refused(name):
    mixer = build(name, (6,), causal=True)
    state = mixer.init_state(2)
    for wrong in (None, 'state', (1, 2)):
        refuses_value('state', mixer.step, X[:, 0], wrong)
    _, later = mixer.step(X[:, 0], state)
    refuses_value('state', mixer.step, X[:, 1], state)
    mixer.step(X[:, 1], later)
