"""The kernels of AFTLocalHard, compiled without a device."""

import pytest
import torch

pytest.importorskip('triton', reason='Triton is not installed')
from aft_mm.ops.triton import window  # noqa: E402

from .triton_offline import assert_no_spills, compiled_for, narrowest_load  # noqa: E402

KERNELS = {'ends_of_blocks', 'sum_windows'}


def call_window(dtype, sizes, grid, causal, channels=64, gate='sigmoid', masked=False):
    tokens = torch.Size(grid).numel()
    query, key, value, gradient = torch.empty(4, 1, tokens, channels, dtype=dtype).unbind()
    query = None if gate == 'none' else query
    key_mask = torch.ones(1, tokens, dtype=torch.bool) if masked else None
    options = gate, sizes, grid, causal
    _, saved = window.hard_window(query, key, value, key_mask, *options, True)
    wanted = [query is not None, True, True]
    window.hard_window_backward(gradient, saved, query, key, value, key_mask, *options, wanted)


@compiled_for(80, 90, 120)
def test_a_causal_grid(compiled, tmp_path):
    dtype = torch.bfloat16
    call_window(dtype, [4, 64], [16, 96], True)
    assert_no_spills(compiled, {*KERNELS, 'add_right_block'}, tmp_path)
    # Four channels at a time, of inputs as of sums.
    for name, kernel in compiled.items():
        assert narrowest_load(kernel) >= 4 * dtype.itemsize, name


# 65 channels: rows that are not aligned for vector loads; and a window of one token.
@pytest.mark.parametrize(
    'size, channels, gate, masked',
    [(8, 64, 'relu', True), (500, 65, 'none', True), (1, 64, 'none', False)],
)
def test_sequences(size, channels, gate, masked, compiled, tmp_path):
    call_window(torch.float16, [size], [1024], size != 8, channels, gate, masked)
    assert_no_spills(compiled, KERNELS, tmp_path)
