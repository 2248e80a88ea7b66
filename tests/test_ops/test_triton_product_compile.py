"""The kernels of AFT-full, AFT-local and AFT-conv, compiled for devices without having them."""

import pytest
import torch

pytest.importorskip('triton', reason='Triton is not installed')
from aft_mm.ops.triton import block_sizes, conv, full_local, tiling  # noqa: E402

from .triton_offline import assert_no_spills, compiled_for, widest_load  # noqa: E402

pytestmark = pytest.mark.slow


def product_kernels(*passes):
    return {f'product_{name}_kernel' for name in passes}


FORWARD = product_kernels('maxima', 'key_terms', 'weights', 'forward', 'recompute_rows')
BACKWARD = product_kernels(
    'target_terms', 'backward', 'recompute_sources', 'bias_backward', 'recompute_bias'
)
SUMS = {op: product_kernels('running_sums') for op in ('local', 'conv')}
SUMS['conv'] |= {'conv_move_kernel'}
# KiB of shared memory per block; sm_86 has the least of sm_8x, as has sm_120.
SHARED_MEMORY = {86: 99, 90: 227, 120: 99}
# Tokens and channels are loaded by 16 bytes; w one number at a time, each with its own mask.
WIDE = product_kernels('maxima', 'key_terms', 'target_terms', 'forward', 'backward')


def call(
    dtype,
    window,
    *bias,
    grid=None,
    causal=True,
    save=True,
    masked=False,
    channels=256,
    pair_mask=None,
):
    """Forward, and backward if `save`; without causality without a gate."""
    query, key, value = torch.empty(3, 2, 1024, channels, dtype=dtype).unbind()
    table = bias[0]
    if len(bias) == 2:
        table = full_local.local_table(*bias, value, window, grid, causal, save)
    key_mask = torch.ones(2, 1024, dtype=torch.bool) if masked else None
    cut = tiling.choose_block(value, save, table.dim() == 4)
    band = tiling.make_band(table, value, window, grid, causal, cut.tile)
    gate = ('sigmoid' if causal else 'none'), band, cut
    tensors = query if causal else None, key, value, table, key_mask
    inputs = full_local.MatmulCall(*tensors, *gate, pair_mask)
    saved = tiling.new_saved(value, band, cut.width, save)
    full_local.launch_forward(inputs, saved)
    if save:
        full_local.launch_backward(torch.empty_like(value), saved, inputs, True)


def call_conv(dtype, kernel, grid, heads=64, channels=64, batch=64, save=True, masked=False):
    """Forward, and backward if `save`."""
    tokens = grid[0] * grid[1]
    query, key, value = torch.empty(3, batch, tokens, channels, dtype=dtype).unbind()
    key, weight = key[..., :heads], torch.empty(heads, *kernel)
    key_mask = torch.ones(batch, tokens, dtype=torch.bool) if masked else None
    common = query, key, value, weight, key_mask, list(grid), 'sigmoid'
    _, saved = conv.conv(*common, save)
    if save:
        wanted = [True] * 4 + [False]
        torch.ops.aft_mm.conv_backward(torch.empty_like(value), saved, *common, wanted)


@pytest.fixture
def capability(request, monkeypatch):
    found = request.node.callspec.params['compiled']
    monkeypatch.setattr(block_sizes, 'capability', lambda *device: divmod(found, 10))
    return found


def assert_fits(compiled, capability, folder, kernels):
    assert_no_spills(compiled, kernels, folder)
    for name, kernel in compiled.items():
        assert kernel.metadata.shared <= SHARED_MEMORY[capability] * 1024, name


FACTORS = torch.empty(1024, 64), torch.empty(1024, 64)


# The products of AFT-conv are those of AFT-local.
TRAINED = [('local', capability) for capability in SHARED_MEMORY] + [('conv', 90)]


@pytest.mark.parametrize('op, compiled', TRAINED, indirect=['compiled'])
def test_training_in_bfloat16_with_float32_biases(op, compiled, capability, tmp_path):
    if op == 'conv':
        call_conv(torch.bfloat16, (11, 11), (32, 32))
    else:
        call(torch.bfloat16, [8, 8], *FACTORS, grid=[32, 32])
    assert_fits(compiled, capability, tmp_path, FORWARD | BACKWARD | SUMS[op])
    assert {name for name in WIDE if widest_load(compiled[name]) == 16} == WIDE
    for name in product_kernels('forward', 'backward', 'bias_backward'):
        ptx = compiled[name].asm['ptx']
        assert ('wgmma' if capability == 90 else 'mma.sync') in ptx and '.tf32' in ptx


@pytest.mark.parametrize('op, compiled', [('local', 90), ('conv', 86)], indirect=['compiled'])
def test_inference_in_bfloat16(op, compiled, capability, tmp_path):
    if op == 'conv':
        call_conv(torch.bfloat16, (11, 11), (32, 32), save=False)
    else:
        call(torch.bfloat16, [256], *FACTORS, save=False)
    assert_fits(compiled, capability, tmp_path, FORWARD | SUMS[op])
    ptx = compiled['product_forward_kernel'].asm['ptx']
    assert 'mma' in ptx and '.bf16' in ptx and '.tf32' not in ptx


@pytest.mark.parametrize(
    'dtype, compiled', [(torch.float32, 86), (torch.bfloat16, 90)], indirect=['compiled']
)
def test_a_bias_per_sample(dtype, compiled, capability, tmp_path):
    """W is computed where it is multiplied."""
    pair_mask = torch.ones(2, 1024, 1024, dtype=torch.bool)
    call(dtype, None, torch.empty(2, 1, 1024, 1024), channels=128, pair_mask=pair_mask)
    kernels = FORWARD | BACKWARD
    assert_fits(compiled, capability, tmp_path, kernels - product_kernels('weights'))


@compiled_for(86)
@pytest.mark.parametrize('op', ['full', 'conv'])
def test_float32(op, compiled, capability, tmp_path):
    if op == 'conv':
        call_conv(torch.float32, (7, 7), (14, 14))
    else:
        call(torch.float32, None, torch.empty(1024, 1024))
    assert_fits(compiled, capability, tmp_path, FORWARD | BACKWARD | SUMS.get(op, set()))


# 65 channels: rows that are not aligned for vector loads; three sequences of 13 channels per head.
@compiled_for(90)
@pytest.mark.parametrize('op', SUMS)
def test_masks_and_odd_sizes(op, compiled, capability, tmp_path):
    if op == 'conv':
        call_conv(torch.bfloat16, (3, 5), (9, 20), heads=5, channels=65, batch=3, masked=True)
    else:
        call(torch.bfloat16, [32], torch.empty(1024, 63), causal=False, masked=True, channels=65)
    assert_fits(compiled, capability, tmp_path, FORWARD | BACKWARD | SUMS[op])
