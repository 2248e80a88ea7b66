"""AFT-conv in bfloat16 by products of tiles (AMX) or pairs (AVX512_BF16), against the oracle.

They are in `aft_mm/ops/native/conv_tiles.h` and `conv_pairs.h`. A processor without instructions for
bfloat16 runs the same cases by the other loops.
"""

import pytest
import torch

from aft_mm import ops
from aft_mm.ops import reference
from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE
from aft_mm.ops.gates import GATES
from aft_mm.ops.native import availability

from ..helpers import each

# Grid, kernel, heads, channels: two rows or one per tile; two heads in a tile of sums and a last one
# alone, five, one, or a half; heights that fill the four rows at once, or not; kernels wider than
# the grid.
SHAPES = [
    ((14, 14), (11, 11), 32, 192),
    ((5, 13), (3, 11), 9, 54),
    ((9, 33), (5, 11), 2, 30),
    ((7, 16), (13, 31), 4, 40),
    ((14, 16), (3, 31), 7, 14),
    ((18, 17), (3, 17), 3, 21),
    ((8, 14), (11, 11), 2, 60),
    ((6, 9), (5, 7), 20, 20),
]
# Mean and limit of position biases, scale of keys, and whether only tokens inside of the kernel count.
# Low position biases cancel in e^w - 1, large keys leave few terms.
LIMITS = [(0, -0.6, 1, False), (-3, -2.9, 1, False), (0, -2.9, 3, False), (0, -9, 1, True)]
ONLY_HERE = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason='needs instructions for bfloat16'
)


@pytest.fixture(autouse=True)
def loops(monkeypatch):
    library = availability.find_library()
    if isinstance(library, str):
        pytest.skip(f'the library of the C++ loops {library}')
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'native')


def draw(shape, key_scale=1, mean=0, lowest=-0.6):
    (rows, columns), kernel, heads, channels = shape
    sizes = channels, heads, channels
    query, key, value = (torch.randn(1, rows * columns, size).bfloat16() for size in sizes)
    return query, key * key_scale, value, (mean + torch.randn(heads, *kernel)).clamp_min(lowest)


def largest_rounding(x):
    """Return half of the distance of bfloat16 numbers around x."""
    return 2.0 ** (x.log2().floor() - 8)


def assert_like_rounding(found, expected):
    """Assert that errors are at most twice those of rounding the result, in the mean square."""
    error, rounding = found - expected, expected.bfloat16() - expected
    assert error.square().mean() <= 4 * rounding.square().mean()
    # Terms, weights and the result are rounded once each.
    assert error.abs().max() <= 3 * largest_rounding(expected.abs().max())


@each('shape', SHAPES)
def test_results_equal_the_oracle(shape):
    for mean, lowest, key_scale, inside in LIMITS:
        query, key, value, weight = draw(shape, key_scale, mean, lowest)
        options = dict(grid=shape[0], global_connectivity=not inside, causal=False, key_mask=None)
        if key_scale == 1:
            options['key_mask'] = torch.rand(key.shape[:2]) > 0.3
            value = value.masked_fill(~options['key_mask'][..., None], torch.nan)
        wide = [x.double() for x in (key, value, weight)]
        mixed = reference.aft_conv(None, *wide, **options, gate='none')
        for gate in GATES:
            given = None if gate == 'none' else query
            found = ops.aft_conv(given, key, value, weight, **options, gate=gate)
            expected = ops.apply_gate(given if given is None else query.double(), mixed, gate)
            assert_like_rounding(found.double(), expected)


@each('wrong', [torch.nan, torch.inf])
@each('shape', SHAPES)
def test_a_wrong_value_reaches_the_tokens_inside_of_the_kernel_only(shape, wrong):
    query, key, value, weight = draw(shape)
    options = dict(grid=shape[0], global_connectivity=False)
    wide = [x.double() for x in (query, key, value, weight)]
    expected = reference.aft_conv(*wide, **options, causal=False, gate='sigmoid', key_mask=None)
    value[0, 5, -1] = wrong
    found = ops.aft_conv(query, key, value, weight, **options).double()
    rows, columns = (torch.arange(size) for size in shape[0])
    (high, broad), width = shape[1], shape[0][1]
    near = (rows - 5 // width).abs()[:, None] <= high // 2
    near = near & ((columns - 5 % width).abs() <= broad // 2)
    right = torch.ones_like(found, dtype=bool)
    right[0, :, -1] = ~near.flatten()
    assert torch.equal(found.isfinite(), right)
    assert_like_rounding(found[right], expected[right])


@ONLY_HERE
@each('shape', SHAPES)
def test_tiles_or_pairs_are_used(shape):
    query, key, value, weight = draw(shape)
    found = ops.aft_conv(query, key, value, weight, grid=shape[0])
    exact = ops.aft_conv(query.float(), key.float(), value.float(), weight, grid=shape[0])
    assert not torch.equal(found, exact.bfloat16())


def test_results_do_not_depend_on_the_number_of_threads():
    given, threads = draw(SHAPES[0]), torch.get_num_threads()
    try:
        results = []
        for number in (1, 3):
            torch.set_num_threads(number)
            results.append(ops.aft_conv(*given, grid=SHAPES[0][0]))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)
