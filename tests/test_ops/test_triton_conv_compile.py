"""The kernels of AFT-conv, compiled for devices without having them."""

import pytest
import torch

pytest.importorskip('triton', reason='Triton is not installed')
from aft_mm.ops.triton import conv as library  # noqa: E402

from .test_triton_product_compile import (  # noqa: E402
    BACKWARD,
    FORWARD,
    WIDE,
    assert_fits,
    capability,
)
from .triton_offline import compiled_for, widest_load  # noqa: E402

assert capability  # a fixture
SUMS = {'move', 'running_sums'}


def call(dtype, kernel, grid, heads=64, channels=64, batch=64, save=True, masked=False):
    """Forward, and backward if `save`."""
    tokens = grid[0] * grid[1]
    query, key, value = torch.empty(3, batch, tokens, channels, dtype=dtype).unbind()
    key, weight = key[..., :heads], torch.empty(heads, *kernel)
    key_mask = torch.ones(batch, tokens, dtype=torch.bool) if masked else None
    common = query, key, value, weight, key_mask, list(grid), 'sigmoid'
    _, saved = library.conv(*common, save)
    if save:
        wanted = [True] * 4 + [False]
        torch.ops.aft_mm.conv_backward(torch.empty_like(value), saved, *common, wanted)


# Its products are those of AFT-local, which are compiled for other devices, too.
@compiled_for(90)
def test_training_in_bfloat16(compiled, capability, tmp_path):
    call(torch.bfloat16, (11, 11), (32, 32))
    assert_fits(compiled, capability, tmp_path, FORWARD | BACKWARD | SUMS)
    assert {name for name in WIDE if widest_load(compiled[name]) == 16} == WIDE


@compiled_for(86)
def test_inference_in_bfloat16(compiled, capability, tmp_path):
    call(torch.bfloat16, (11, 11), (32, 32), save=False)
    assert_fits(compiled, capability, tmp_path, FORWARD | SUMS)
    ptx = compiled['mean_forward'].asm['ptx']
    assert 'mma' in ptx and '.bf16' in ptx and '.tf32' not in ptx


@compiled_for(86)
def test_float32(compiled, capability, tmp_path):
    call(torch.float32, (7, 7), (14, 14))
    assert_fits(compiled, capability, tmp_path, FORWARD | BACKWARD | SUMS)


# Three sequences of 13 channels: few per head, and rows that are not aligned for vector loads.
@compiled_for(90)
def test_masks_and_odd_sizes(compiled, capability, tmp_path):
    call(torch.bfloat16, (3, 5), (9, 20), heads=5, channels=65, batch=3, masked=True)
    assert_fits(compiled, capability, tmp_path, FORWARD | BACKWARD | SUMS)
