"""The kernels of AFT-conv, compiled for sm_80 and sm_90 without a device."""

import re

import pytest
import torch

from aft_mm.ops.triton import support as triton_support

pytest.importorskip('triton', reason='Triton is not installed')
from aft_mm.ops.triton import conv_launch as launch  # noqa: E402

from .triton_offline import assert_no_spills  # noqa: E402

KERNELS = {'terms', 'side_sums', 'forward', 'output_gradients', 'backward', 'weight_gradient'}


def call_conv(dtype, kernel, grid, channels=64, gate='sigmoid', masked=False):
    tokens = grid[0] * grid[1]
    query, key, value, gradient = torch.empty(4, 1, tokens, channels, dtype=dtype).unbind()
    weight = torch.empty(channels, kernel, kernel)
    query = None if gate == 'none' else query
    key_mask = torch.ones(1, tokens, dtype=torch.bool) if masked else None
    common = query, key, value, weight, key_mask, grid, gate
    _, sums = launch.conv_forward(*common, True)
    launch.conv_backward(gradient, sums, *common)


# Tiles of 7 and of 8 tokens; the largest kernels of one span and of two.
@pytest.mark.parametrize(
    'kernel, grid', [(7, (14, 14)), (11, (14, 14)), (15, (24, 24)), (27, (24, 24))]
)
def test_every_kernel_and_tile(kernel, grid, compiled, tmp_path):
    call_conv(torch.bfloat16, kernel, grid)
    assert_no_spills(compiled, KERNELS, tmp_path)


# 65 channels: rows that no vector of numbers is aligned to.
@pytest.mark.parametrize(
    'dtype, channels, gate, masked',
    [
        (torch.float32, 64, 'sigmoid', True),
        (torch.float16, 64, 'sigmoid', False),
        (torch.bfloat16, 64, 'relu', True),
        (torch.bfloat16, 65, 'none', False),
    ],
)
def test_types_gates_masks_and_odd_sizes(dtype, channels, gate, masked, compiled, tmp_path):
    assert dtype in triton_support.DTYPES
    call_conv(dtype, 3, (9, 9), channels, gate, masked)
    assert_no_spills(compiled, KERNELS, tmp_path)


def test_nothing_passes_between_threads(compiled):
    """A step loads both channels of a thread at once, and no layout is converted."""
    call_conv(torch.bfloat16, 3, (14, 14))
    for name in ('side_sums', 'forward', 'backward', 'weight_gradient'):
        assert compiled[name].metadata.shared == 0
    loads = re.findall(r'ld\.global\S*', compiled['weight_gradient'].asm['ptx'])
    tokens = 7
    assert len(loads) == 2 * tokens + 2 * (tokens + 3 - 1)
    assert set(loads) == {'ld.global.v2.b32'}
