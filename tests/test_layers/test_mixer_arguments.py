"""Bad arguments and inputs of mixers raise one-line errors that name the argument."""

import math

import pytest
import torch

from aft_mm.registry import MODELS

from .mixer_cases import MIXERS, D, build, tokens


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    'config, message',
    [
        (dict(type='AFTFull', rank=0), 'rank must be .*, got 0'),
        (dict(type='AFTFull', grid=None), 'grid must be given for AFTFull, got None'),
        (dict(type='AFTFull', grid=(0, 3)), r'grid must be .* ints, 1 or larger, got \(0, 3\)'),
        (dict(type='AFTFull', grid=(2, 2, 2, 2)), 'grid must be .* ints, 1 or larger'),
        (dict(type='AFTFull', gate='tanh'), "gate must be one of sigmoid, .* got 'tanh'"),
        (dict(type='AFTFull', num_prefix_tokens=-1), 'must be an int, 0 or larger'),
        (dict(type='AFTFull', embed_dims=0), 'embed_dims must be an int, 1 or larger, got 0'),
        (dict(type='AFTSimple', key_function='exp'), "key_function must be one .* got 'exp'"),
        (
            dict(type='AFTSimple', key_function='relu2', gate='sigmoid'),
            "gate must be 'relu' for key_function='relu2', got 'sigmoid'",
        ),
        (dict(type='AFTLocal', window=-1), 'window must be .* ints, 0 or larger, got -1'),
        (dict(type='AFTLocal', window=(1, 2, 3)), 'window must be an int or 2 ints'),
        (dict(type='AFTLocal', window=1, rank=None), r'1 dimension for a free .* got \(3, 4\)'),
        (dict(type='AFTLocal', window=0, rank=None, grid=(4,)), 'window must be 1 or .* got 0'),
        (dict(type='AFTLocal', window=1, rank=0), 'rank must be .*, got 0'),
        (dict(type='AFTLocal', window=1, grid=None), 'grid must have 1 or 2 dimensions .* None'),
        (dict(type='AFTLocal', window=1, num_prefix_tokens=1), 'must be 0 for AFTLocal, got 1'),
        (dict(type='AFTLocalLearned', window=-1), 'window must be .* ints, 0 or larger, got -1'),
        (dict(type='AFTLocalHard', window=3), 'window must be even .* got 3'),
        (dict(type='AFTLocalHard', window=2.5), r'window must be an int or .* got 2.5'),
        (dict(type='AFTLocal', window=True), r'window must be an int or .* got True'),
        (
            dict(type='AFTLocalHard', window=0, grid=(4,)),
            'window must be an int, 1 or larger, got 0',
        ),
        (dict(type='LocalSoftmaxAttention', num_heads=5, window=2), 'divides embed_dims=12, got 5'),
        (dict(type='LocalSoftmaxAttention', num_heads=3, window=0), 'window must be .* 1 or .* 0'),
        (
            dict(type='LocalSoftmaxAttention', num_heads=3, window=(2, 2), grid=(9,)),
            r'window must be .*1 or larger, got \(2, 2\)',
        ),
        (
            dict(type='LocalSoftmaxAttention', num_heads=3, window=2, margin=(1, -1)),
            r'margin must be .* ints, 0 or larger, got \(1, -1\)',
        ),
        (
            dict(type='LocalSoftmaxAttention', num_heads=3, window=2, grid=(2, 2, 2)),
            'grid must have 1 or 2 dimensions for LocalSoftmaxAttention',
        ),
        (dict(type='AFTConv', num_heads=5, kernel_size=3), 'divides embed_dims=12, got 5'),
        (dict(type='AFTConv', num_heads=4, kernel_size=4), r'must be odd, got \(4, 4\)'),
        (dict(type='AFTConv', num_heads=4, kernel_size=(3,)), r'or 2 ints, .* got \(3,\)'),
        (
            dict(type='AFTConv', num_heads=4, kernel_size=3, sparsity='l1'),
            "sparsity must be one of none, entropy, gumbel, got 'l1'",
        ),
        *[
            (
                dict(type='AFTConv', num_heads=4, kernel_size=3, sparsity='gumbel', tau=tau),
                f'tau must be a finite number above 0, got {tau!r}',
            )
            for tau in (0, -0.5, math.inf, math.nan, 'soft')
        ],
        *[
            (
                dict(type='AFTConv', num_heads=4, kernel_size=3, sparsity=sparsity, tau=0.5),
                f"tau must be left at its default with sparsity='{sparsity}', got 0.5",
            )
            for sparsity in ('none', 'entropy')
        ],
        (
            dict(type='AFTConv', num_heads=4, kernel_size=3, num_prefix_tokens=1),
            'num_prefix_tokens must be 0 for AFTConv, got 1',
        ),
        *[
            (dict(type=f'{name}', num_heads=5, **others), 'divides embed_dims=12, got 5')
            for name, others in {
                'SoftmaxAttention': {},
                'LinearAttention': {},
                'PerformerAttention': {},
                'DenseSynthesizer': {},
                'LambdaLayer': {},
                'LSHAttention': {},
                'StridedAttention': dict(stride=2),
            }.items()
        ],
        (
            dict(type='LinearAttention', num_heads=3, feature_map='tanh'),
            "feature_map must be one of elu, relu, square, got 'tanh'",
        ),
        (
            dict(type='PerformerAttention', num_heads=3, num_features=0),
            'num_features must be an int, 1 or larger, got 0',
        ),
        (
            dict(type='PerformerAttention', num_heads=3, redraw=0),
            'redraw must be an int, 1 or larger, got 0',
        ),
        (
            dict(type='DenseSynthesizer', num_heads=3, grid=None),
            'grid must be given for DenseSynthesizer, got None',
        ),
        (dict(type='LambdaLayer', num_heads=3, causal=True), 'causal must be False .* got True'),
        (dict(type='LambdaLayer', num_heads=3, grid=None), 'grid must be given for LambdaLayer'),
        (dict(type='LambdaLayer', num_heads=3, key_dims=0), 'key_dims must be an int, 1 .* got 0'),
        (
            dict(type='LSHAttention', num_heads=3, num_buckets=3),
            'num_buckets must be 1 or even and positive, got 3',
        ),
        (
            dict(type='LSHAttention', num_heads=3, chunk_size=0),
            'chunk_size must be an int, 1 .* got 0',
        ),
        (
            dict(type='LSHAttention', num_heads=3, num_rounds=0),
            'num_rounds must be an int, 1 .* got 0',
        ),
        (dict(type='StridedAttention', num_heads=3, stride=0), 'stride must be an int, 1 .* got 0'),
        (
            dict(type='StridedAttention', num_heads=3, stride=4, pattern='local'),
            "pattern must be one of strided, fixed, got 'local'",
        ),
        *[
            (
                dict(type='StridedAttention', num_heads=3, stride=4, **wrong),
                r"summary must be 1 to stride=4 for pattern='fixed' and None for 'strided', got",
            )
            for wrong in (dict(summary=1), dict(pattern='fixed'), dict(pattern='fixed', summary=5))
        ],
        (
            dict(type='StridedAttention', num_heads=3, stride=4, qk_dims=10),
            'qk_dims must be a multiple of num_heads=3, got 10',
        ),
    ],
    ids=str,
)
def test_bad_arguments_raise_a_one_line_error(config, message):
    config = {'embed_dims': D, 'grid': (3, 4), **config, 'type': 'aft_mm.' + config['type']}
    with pytest.raises(ValueError, match=message) as error:
        MODELS.build(config)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('name', MIXERS)
def test_an_unknown_argument_is_named(name):
    with pytest.raises(TypeError, match=r"has no argument 'widnow', only embed_dims, .*grid"):
        build(name, widnow=3)


@pytest.mark.parametrize('name', ['AFTLocal', 'AFTLocalLearned', 'AFTConv', 'AFTLocalHard'])
def test_bad_inputs_raise_a_one_line_error(name):
    mixer, x = build(name, (3, 5), causal=False), tokens((3, 5))
    with pytest.raises(ValueError, match=r'grid must hold 14 tokens .* got \(3, 5\)'):
        mixer(x[:, 1:])
    with pytest.raises(ValueError, match=r'grid must hold 15 tokens .* got \(2, 7\)'):
        mixer(x, grid=(2, 7))
    with pytest.raises(ValueError, match=r'key_mask must be bool \[2, 15\] .*float32 \[2, 14\]'):
        mixer(x, key_mask=torch.ones(2, 14))
    with pytest.raises(ValueError, match=r'memory must be None for AFT\w+ .* got \[2, 15, 12\]'):
        mixer(x, memory=x)
    with pytest.raises(ValueError, match='causal must be True for steps of AFT'):
        mixer.init_state(1)


def test_memory_grid_and_lengths_are_checked():
    x = tokens((7,))
    with pytest.raises(ValueError, match='memory must be None for AFTSimple with causal=True'):
        build('AFTSimple', causal=True)(x, memory=x)
    with pytest.raises(ValueError, match='memory must be None for AFTSimple'):
        build('AFTSimple', gate='none')(x, memory=x)
    with pytest.raises(
        ValueError, match=r'grid must fit positions learned on grid \(7,\), got \(8,\)'
    ):
        build('AFTFull')(torch.randn(1, 8, D))
    with pytest.raises(ValueError, match='grid must be given for AFTConv to take steps, got None'):
        build('AFTConv', grid=None, causal=True).init_state(1)
    with pytest.raises(ValueError, match=r'lengths must be \[2\], got \[3\]'):
        build('SoftmaxAttention', causal=True).prefill(x, torch.tensor([1, 2, 3]))


WITH_TABLE = ['DenseSynthesizer', 'LSHAttention', 'StridedAttention', 'SoftmaxAttention-stateless']


@pytest.mark.parametrize('name', WITH_TABLE)
def test_a_prompt_or_token_beyond_the_table_is_refused(name):
    mixer, x = build(name, causal=True), torch.randn(2, 8, D)
    if name != 'DenseSynthesizer':  # its weights limit the length first
        with pytest.raises(ValueError, match='a prompt must have at most 7 tokens, got 8'):
            mixer.prefill(x, torch.tensor([8, 3]))
    _, state = mixer.prefill(x[:, :7], torch.tensor([7, 3]))
    with pytest.raises(ValueError, match='the state must hold at most 7 tokens, got one more'):
        mixer.step(x[:, 7], state)
    if name != 'DenseSynthesizer':
        with pytest.raises(ValueError, match='grid must be given .* got None'):
            build(name, None, causal=True).init_state(1)


@pytest.mark.parametrize('name', ['DenseSynthesizer', 'LambdaLayer'])
def test_a_grid_larger_than_the_learned_one_is_refused(name):
    with pytest.raises(ValueError, match=r'grid must be .*\(7,\).* got \(8,\)'):
        build(name)(torch.randn(1, 8, D))


def test_a_raster_is_refused_whose_grid_the_constructor_does_not_know():
    with pytest.raises(ValueError, match=r'grid must be given to the .* got \(3, 5\) for these'):
        build('AFTLocalHard', None, causal=True, window=2)(tokens((3, 5)), grid=(3, 5))


def test_a_state_of_another_mixer_or_batch_is_refused():
    x, mixer = torch.randn(2, D), build('LinearAttention', causal=True)
    with pytest.raises(ValueError, match='of this LinearAttention, got TokenTable'):
        mixer.step(x, build('DenseSynthesizer', causal=True).init_state(2))
    for name in (*WITH_TABLE, 'AFTFull', 'AFTSimple', 'SoftmaxAttention'):
        mixer = build(name, causal=True)
        with pytest.raises(ValueError, match=r'x_t must be \[3, 12\] as the state'):
            mixer.step(x, mixer.init_state(3))
        with pytest.raises(ValueError, match=r'of this \w+, got LinearState'):
            mixer.step(x, build('LinearAttention', causal=True).init_state(2))
