"""The kernels of causal AFT-simple, compiled for sm_80 and sm_90 without a device."""

import re

import pytest
import torch

from aft_mm.ops.triton import support as triton_support

pytest.importorskip('triton', reason='Triton is not installed')
from aft_mm.ops.triton import simple_launch as launch  # noqa: E402

from .triton_offline import assert_no_spills  # noqa: E402

KERNELS = {'chunk_sums', 'prefix', 'forward', 'backward_chunk_sums', 'backward'}


@pytest.fixture(autouse=True)
def _chunks(monkeypatch):
    monkeypatch.setattr(launch, 'wanted_programs', lambda device: 10**6)


def call_causal_simple(dtype, channels, gate='sigmoid', masked=False):
    query, key, value, gradient = torch.empty(4, 1, 1024, channels, dtype=dtype).unbind()
    query = None if gate == 'none' else query
    key_mask = torch.ones(1, 1024, dtype=torch.bool) if masked else None
    _, saved = launch.causal_simple_forward(query, key, value, key_mask, gate, True)
    launch.causal_simple_backward(gradient, saved, query, key, value, key_mask, gate)


@pytest.mark.parametrize('channels', [32, 64])
@pytest.mark.parametrize('dtype', triton_support.DTYPES, ids=str)
def test_every_kernel_type_and_block(dtype, channels, compiled, tmp_path):
    call_causal_simple(dtype, channels)
    assert_no_spills(compiled, KERNELS, tmp_path)


# 65 channels: rows that no vector of numbers is aligned to.
@pytest.mark.parametrize('channels, gate, masked', [(64, 'relu', True), (65, 'none', False)])
def test_gates_masks_and_odd_sizes(channels, gate, masked, compiled, tmp_path):
    call_causal_simple(torch.bfloat16, channels, gate, masked)
    assert_no_spills(compiled, KERNELS, tmp_path)


def test_a_row_is_one_access(compiled):
    """Both channels of a thread at once: query, key and value per token, three parts of the sum."""
    call_causal_simple(torch.bfloat16, 64)
    loads = re.findall(r'ld\.global\S*', compiled['forward'].asm['ptx'])
    assert len(loads) == 3 * launch.ROWS + 3
