"""The kernels of causal AFT-simple, compiled without a device."""

import pytest
import torch

pytest.importorskip('triton', reason='Triton is not installed')
from aft_mm.ops.triton import simple  # noqa: E402

from .triton_offline import assert_no_spills, compiled_for, narrowest_load  # noqa: E402

pytestmark = pytest.mark.slow

KERNELS = {
    'simple_forward_sums_kernel',
    'simple_forward_kernel',
    'simple_backward_sums_kernel',
    'simple_backward_kernel',
}


@pytest.fixture(autouse=True)
def _chunks(monkeypatch):
    monkeypatch.setattr(simple, 'count_processors', lambda device: 10**6)


def call_causal_simple(
    dtype, channels, key='softmax', gate='sigmoid', masked=False, tokens=1024, units=False
):
    query, key_, value, gradient = torch.empty(4, 1, tokens, channels, dtype=dtype).unbind()
    query = None if gate == 'none' else query
    key_mask = torch.ones(1, tokens, dtype=torch.bool) if masked else None
    inputs = query, key_, value, key_mask, key, gate, units
    saved = simple.new_results(value, save=True)[1]
    simple.causal_simple(*inputs, True)
    simple.causal_simple_backward(gradient, saved, *inputs, [query is not None, True, True])


@compiled_for(80, 90, 120)
def test_every_kernel(compiled, tmp_path):
    call_causal_simple(torch.float32, 64)
    assert_no_spills(compiled, KERNELS, tmp_path)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
def test_whole_rows_are_loaded_16_bytes_at_a_time(dtype, compiled, tmp_path, monkeypatch):
    """Forward with many sequences; with few, half rows by 8 bytes."""
    monkeypatch.setattr(simple, 'count_processors', lambda device: 0)
    call_causal_simple(dtype, 64)
    assert_no_spills(compiled, {'simple_forward_kernel', 'simple_backward_kernel'}, tmp_path)
    assert narrowest_load(compiled['simple_forward_kernel']) == 16


@pytest.mark.parametrize(
    'dtype, compiled', [(torch.float32, 80), (torch.bfloat16, 90)], indirect=['compiled']
)
def test_units_of_tiles(dtype, compiled, tmp_path):
    call_causal_simple(dtype, 64, masked=True, units=True)
    assert_no_spills(compiled, KERNELS, tmp_path)


# 65 channels: rows that are not aligned for vector loads; and a constant length.
@pytest.mark.parametrize(
    'channels, key, gate, masked, tokens',
    [
        (64, 'relu2', 'relu', True, 1024),
        (65, 'softmax', 'none', True, 1024),
        (64, 'relu', 'none', False, 1),
    ],
)
def test_gates_masks_and_odd_sizes(channels, key, gate, masked, tokens, compiled, tmp_path):
    call_causal_simple(torch.float16, channels, key, gate, masked, tokens)
    expected = KERNELS if tokens > 1 else {'simple_forward_kernel', 'simple_backward_kernel'}
    assert_no_spills(compiled, expected, tmp_path)
