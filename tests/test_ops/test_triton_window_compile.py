"""The kernels of AFTWindow, compiled for sm_80 and sm_90 without a device."""

import pytest
import torch

from aft_mm.ops.triton import support as triton_support

pytest.importorskip('triton', reason='Triton is not installed')
from aft_mm.ops.triton import window_launch as launch  # noqa: E402

from .triton_offline import assert_no_spills, widest_load  # noqa: E402

KERNELS = {'weigh', 'weigh_gradient', 'window_mean', 'window_gradient'}


def call_window(dtype, window, grid, causal, channels=64, gate='sigmoid', masked=False):
    tokens = torch.Size(grid).numel()
    query, key, value, gradient = torch.empty(4, 1, tokens, channels, dtype=dtype).unbind()
    query = None if gate == 'none' else query
    key_mask = torch.ones(1, tokens, dtype=torch.bool) if masked else None
    options = torch.empty(1, 1, channels), gate, launch.find_places(window, grid, causal)
    _, saved = launch.window_forward(query, key, value, key_mask, *options, True)
    launch.window_backward(gradient, saved, query, key, value, key_mask, *options)


# A sequence whose tiles are summed; a causal grid, wide and narrow.
PLACES = {
    'line': ([500], [1024]),
    'grid': ([4, 64], [16, 96]),
    'narrow': ([4, 8], [16, 24]),
}


@pytest.mark.parametrize('places', PLACES)
@pytest.mark.parametrize('dtype', triton_support.DTYPES, ids=str)
def test_every_kernel_type_and_block(dtype, places, compiled, tmp_path):
    call_window(dtype, *PLACES[places], causal=True)
    assert_no_spills(compiled, KERNELS, tmp_path)


def test_loads_are_16_bytes_wide(compiled):
    call_window(torch.bfloat16, *PLACES['grid'], causal=True)
    widths = {name: widest_load(kernel) for name, kernel in compiled.items()}
    assert widths == dict.fromkeys(KERNELS, 16)


# 65 channels: rows that no vector of numbers is aligned to.
@pytest.mark.parametrize('channels, gate, masked', [(64, 'relu', True), (65, 'none', False)])
def test_gates_masks_and_odd_sizes(channels, gate, masked, compiled, tmp_path):
    call_window(torch.bfloat16, [8], [1024], False, channels, gate, masked)
    assert_no_spills(compiled, KERNELS, tmp_path)
