"""The kernels of AFT-full and AFT-local, compiled for sm_80 and sm_90 without a device."""

import pytest
import torch

from aft_mm.ops.triton import support as triton_support

pytest.importorskip('triton', reason='Triton is not installed')
from aft_mm.ops.triton import band_launch as launch  # noqa: E402

from .triton_offline import assert_no_spills  # noqa: E402

KERNELS = {
    'key_ranges',
    'bias_ranges',
    'key_terms',
    'forward',
    'mean_terms',
    'backward',
    'bias_gradient',
}
# What a block of threads may have on the devices served, sm_86 the least of the sm_8x.
SHARED_MEMORY = {80: 99 * 1024, 90: 227 * 1024}


def call_band(dtype, bias, other=None, window=32, gate='sigmoid', masked=False, channels=64):
    """Forward and backward; causal with a gate."""
    inputs = prepare(dtype, bias, other, window, gate, masked, channels)
    _, saved = launch.banded_forward(*inputs, True)
    launch.banded_backward(torch.empty_like(inputs[1]), saved, *inputs, True)


def prepare(dtype, bias, other, window, gate='sigmoid', masked=False, channels=64):
    query, key, value = torch.empty(3, 1, 1024, channels, dtype=dtype).unbind()
    key_mask = torch.ones(1, 1024, dtype=torch.bool) if masked else None
    band = launch.make_band(bias, other, window, gate != 'none', value)
    (shift, _), (row_shift, _) = launch.ranges(key, key_mask, band)
    query, row_shift = None if gate == 'none' else query, row_shift if window is None else None
    return query, key, value, key_mask, shift, row_shift, band, gate


def assert_fits(compiled, capability, folder, kernels=KERNELS):
    assert_no_spills(compiled, kernels, folder)
    for name, kernel in compiled.items():
        assert kernel.metadata.shared <= SHARED_MEMORY[capability], name


@pytest.fixture
def capability(request):
    return request.node.callspec.params['compiled']


@pytest.mark.parametrize('dtype', triton_support.DTYPES, ids=str)
def test_a_dense_bias(dtype, compiled, capability, tmp_path):
    call_band(dtype, torch.empty(1024, 1024, dtype=dtype), window=None)
    assert_fits(compiled, capability, tmp_path)


@pytest.mark.parametrize('dtype', triton_support.DTYPES, ids=str)
def test_factors(dtype, compiled, capability, tmp_path):
    call_band(dtype, *torch.empty(2, 1024, 128, dtype=dtype))
    assert_fits(compiled, capability, tmp_path)


# As under autocast; 65 channels: rows that no vector of numbers is aligned to.
@pytest.mark.parametrize('rank, gate, masked', [(24, 'relu', True), (0, 'none', False)])
def test_float32_biases_gates_masks_and_odd_sizes(
    rank, gate, masked, compiled, capability, tmp_path
):
    bias = torch.empty(2, 1024, rank).unbind() if rank else [torch.empty(1024, 63)]
    call_band(torch.bfloat16, *bias, gate=gate, masked=masked, channels=65)
    assert_fits(compiled, capability, tmp_path)


@pytest.mark.parametrize('factors', [False, True])
def test_products_of_bfloat16(factors, compiled, capability, tmp_path):
    shape = (2, 1024, 128) if factors else (1024, 1024)
    bias = torch.empty(shape, dtype=torch.bfloat16)
    inputs = prepare(torch.bfloat16, *(bias if factors else (bias, None)), 32 if factors else None)
    launch.banded_forward(*inputs, False)
    forward = {'key_ranges', 'bias_ranges', 'key_terms', 'forward'}
    assert_fits(compiled, capability, tmp_path, forward)
    assert 'mma' in compiled['forward'].asm['ptx'] and 'bf16' in compiled['forward'].asm['ptx']
