"""The Triton kernels of AFT-conv against the float64 oracle; see `triton_parity.py`."""

import pytest
import torch

from .cases import CASES, run_with_gradients
from .test_backends import assert_close, oracle
from .triton_parity import BFLOAT16, DEVICE, MARKS, TERMS, TOLERANCE, compare, inputs

from .kernel_cases import SHIPPED, NoWait, conv, spread_keys, tiling  # isort: skip - where Triton is
from aft_mm.ops.triton import conv as library  # isort: skip
from aft_mm.ops.triton import full_local as launch  # isort: skip

pytestmark = MARKS


SERVED = [
    case
    for case in CASES
    if case.op == 'aft_conv'
    and len(case.options['grid']) < 3
    and not case.options['causal']
    and case.options.get('global_connectivity', True)
]


@pytest.mark.parametrize('case', SERVED, ids=lambda case: case.name)
def test_matches_oracle(case, monkeypatch):
    compare(case, inputs(case, 3), monkeypatch)


# With tiles of 32 positions: kernel rows that reach over zero, one and two tiles; sums beyond them;
# one or many empty positions at the end of each row; a row longer than a tile.
@pytest.mark.parametrize('grid, kernel', [((14, 14), (3, 7)), ((3, 40), (1, 7)), ((150,), (5,))])
def test_maps_of_several_tiles(grid, kernel, monkeypatch):
    case = conv(grid, kernel, channels=2)
    compare(case, inputs(case, 1), monkeypatch)


@SHIPPED
@BFLOAT16
def test_types(dtype, monkeypatch):
    """Two tiles of 64 positions, with a mean for which the gradient of the key is a difference."""
    case = conv((7, 11), heads=1, channels=2)
    tensors = inputs(case, 2, dtype)
    tensors[2] += 10
    compare(case, tensors, monkeypatch)
    with torch.no_grad():  # bfloat16 is multiplied without conversion
        got = case(*tensors)
    assert_close([got], oracle(case, tensors, monkeypatch)[:1], TOLERANCE[dtype])


def test_more_sequences_and_channels_than_a_program_takes(monkeypatch):
    case = conv((1, 3), heads=2, channels=18)
    compare(case, inputs(case, 9), monkeypatch)


# Three tiles, without and with rows that are recomputed.
@pytest.mark.parametrize('keys, signs, bias', [('huge', 'all', -20), ('late', 'both', 29)])
def test_keys_and_biases_of_any_size(keys, signs, bias, monkeypatch):
    """For a kernel value of −20 on a key of +20, the difference of sums would be 0/0."""
    case = conv((9, 8), channels=2)
    query, key, value, weight = inputs(case, 1)
    sign = weight.sign() if signs == 'both' else (weight > 0).float()
    if signs == 'all':
        sign = torch.ones_like(weight)
    compare(case, [query, spread_keys(keys, key), value, bias * sign], monkeypatch, TERMS)


def flags_of(case, tensors):
    """Return the flags that a call with gradients writes, [h, tiles, blocks of channels]."""
    query, key, value, weight = (x.requires_grad_() for x in tensors)
    grid = case.options['grid']
    saved = library.conv(query, key, value, weight, None, list(grid), 'sigmoid', True)[1]
    places = library._padded_maps(value, weight, grid)
    band, block = places.tiles(value, True)
    like = value.new_empty(places.shape)
    return tiling.split_saved(saved, like, band, block.width).flags


def test_only_flagged_rows_are_recomputed():
    """Not for keys of any size, nor for biases of 20; those of one head starve rows of that."""
    case = conv((9, 8), channels=2)
    query, key, value, weight = inputs(case, 1)
    assert (flags_of(case, [query, 1e4 * key, value, 20 * weight.sign()]) == 0).all()
    key[:, 20] = 100
    weight[1], weight[1, 0, 0] = -50, 50
    flags = flags_of(case, [query, key, value, weight])
    assert flags.shape == (2, 3, 1) and (flags[0] == 0).all() and flags[1].any()


def test_the_gradient_of_weight_in_parts(monkeypatch):
    case = conv((9, 8), channels=2)
    tensors = inputs(case, 1)
    expected = run_with_gradients(case, tensors)
    monkeypatch.setattr(launch, 'PROGRAMS_PER_PROCESSOR', 10**6)
    torch.testing.assert_close(run_with_gradients(case, tensors), expected, rtol=1e-5, atol=1e-5)


def test_the_op_does_not_synchronise():
    """Forward and backward inside the op, where the mode does not see calls."""
    tensors = inputs(conv(), 1)
    gradient = torch.randn_like(tensors[2])
    mask = torch.ones(1, 10, dtype=torch.bool, device=DEVICE)
    with NoWait():
        places, call, moved = library._moved_call(*tensors, mask, [2, 5], 'sigmoid', True, gradient)
        saved = tiling.new_saved(call.value, call.band, call.block.width)
        places.move_back(launch.launch_forward(call, saved))
        launch.launch_backward(moved, saved, call, True)
