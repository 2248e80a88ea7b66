"""The kernels of decoding steps, compiled without a device."""

import pytest
import torch

from aft_mm import ops

pytest.importorskip('triton', reason='Triton is not installed')
from aft_mm.ops.triton import steps  # noqa: E402

from .triton_offline import assert_no_spills, compiled_for, load_widths  # noqa: E402

pytestmark = pytest.mark.slow

CHANNELS, TOKENS = 64, 48
GRID, KERNEL = (6, 8), (3, 5)
CALLS = {
    'simple': (ops.aft_simple_init_state, (), dict(key_function='softmax')),
    'full': (ops.aft_full_init_state, ((TOKENS, TOKENS),), {}),
    'local': (ops.aft_local_init_state, ((TOKENS, 24), (TOKENS, 24)), dict(window=9, grid=None)),
    'local 2-d': (ops.aft_local_init_state, ((TOKENS, 24),) * 2, dict(window=(2, 3), grid=GRID)),
    'local free': (ops.aft_local_init_state, ((TOKENS, 9),), dict(window=9, grid=None)),
    'window': (ops.aft_local_hard_init_state, (), dict(window=9, grid=None)),
    'window 2-d': (ops.aft_local_hard_init_state, (), dict(window=(4, 4), grid=GRID)),
    'conv': (ops.aft_conv_init_state, ((4, 5),), dict(grid=(TOKENS,), global_connectivity=True)),
    'conv 2-d': (
        ops.aft_conv_init_state,
        ((4, *KERNEL),),
        dict(grid=GRID, global_connectivity=False),
    ),
}


def call_step(name, dtype, channels=CHANNELS, gate='sigmoid', bias_dtype=torch.float32):
    init, shapes, options = CALLS[name]
    op = init.__name__.removesuffix('_init_state')
    sizes = {'aft_full': dict(num_tokens=TOKENS), 'aft_conv': dict(grid=options.get('grid'))}
    sizes = sizes.get(op, options)
    if op == 'aft_conv':
        sizes = dict(sizes, num_heads=shapes[0][0], kernel_size=shapes[0][1:])
    state = init(2, channels, **sizes)
    query, key, value = torch.empty(3, 2, channels, dtype=dtype).unbind()
    key = key[:, : state.keys.shape[2]] if op == 'aft_conv' else key
    query = None if gate == 'none' else query
    bias = [torch.empty(shape, dtype=bias_dtype) for shape in shapes]
    if op == 'aft_local' and len(bias) == 1:
        bias.append(None)
    getattr(steps, f'{op}_step')(state, query, key, value, *bias, **options, gate=gate)


def kernel_of(name):
    return {'simple_step_kernel' if name == 'simple' else 'buffer_step_kernel'}


@pytest.mark.parametrize('name', CALLS)
def test_every_op(name, compiled, tmp_path):
    call_step(name, torch.float32)
    assert_no_spills(compiled, kernel_of(name), tmp_path)


@pytest.mark.parametrize('name', ['full', 'local', 'window 2-d'])
def test_the_buffer_is_loaded_16_bytes_at_a_time(name, compiled):
    call_step(name, torch.float32)
    rows = {'full': 32, 'local': 16, 'window 2-d': 32}[name]
    # Keys and values [rows, 32], 4 numbers for each of 128 threads.
    assert load_widths(compiled['buffer_step_kernel'])[16] >= 2 * rows * 32 / (4 * 128)


def test_weights_are_found_once_per_head(compiled):
    """Counts exponentials: the 4 channels of a thread belong to one head or to four."""
    exponentials = {}
    for heads in (4, CHANNELS):
        state = ops.aft_conv_init_state(
            2, CHANNELS, grid=(TOKENS,), num_heads=heads, kernel_size=(5,)
        )
        key, value = torch.empty(2, heads), torch.empty(2, CHANNELS)
        options = dict(grid=(TOKENS,), global_connectivity=False, gate='none')
        steps.aft_conv_step(state, None, key, value, torch.empty(heads, 5), **options)
        exponentials[heads] = compiled['buffer_step_kernel'].asm['ptx'].count('ex2.approx')
    assert 2 * exponentials[4] <= exponentials[CHANNELS]


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize('name', ['simple', 'local'])
def test_every_type(name, dtype, compiled, tmp_path):
    call_step(name, dtype, bias_dtype=dtype)
    assert_no_spills(compiled, kernel_of(name), tmp_path)


@compiled_for(80, 120)
@pytest.mark.parametrize('name', ['simple', 'local 2-d'])
def test_other_devices(name, compiled, tmp_path):
    call_step(name, torch.float32)
    assert_no_spills(compiled, kernel_of(name), tmp_path)


# 196 channels: heads of more than one tile, with an incomplete last tile.
@pytest.mark.parametrize(
    'name, channels, gate',
    [('simple', 64, 'relu'), ('simple', 196, 'none'), ('conv 2-d', 196, 'relu')],
)
def test_gates_and_odd_sizes(name, channels, gate, compiled, tmp_path):
    call_step(name, torch.bfloat16, channels, gate)
    assert_no_spills(compiled, kernel_of(name), tmp_path)
