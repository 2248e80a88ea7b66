"""AFT-conv on a CPU without a gradient: in turns, with kept kernels, in bfloat16."""

import pytest
import torch
from torch.autograd import forward_ad

from aft_mm import ops
from aft_mm.ops.eager import inference_convolution
from aft_mm.ops.eager.inference_convolution import LARGEST_ROUNDED_BIAS

from .test_numerics import assert_close


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def tokens(batch, grid, channels, heads, dtype=torch.float32):
    count = grid[0] * grid[1]
    query, value = torch.randn(2, batch, count, channels).to(dtype)
    return query, torch.randn(batch, count, heads).to(dtype), value


@pytest.mark.parametrize('at_a_time', [1, 2 * 35 * 8, 4 * 35 * 8])
def test_samples_in_turns_are_those_of_one_call(at_a_time, monkeypatch):
    query, key, value = tokens(5, (5, 7), 6, 2)
    mask = torch.rand(5, 35) > 0.3
    mask[2] = False
    key, value = (x.masked_fill(~mask.unsqueeze(-1), torch.nan) for x in (key, value))
    options = dict(grid=(5, 7), key_mask=mask)
    weight = torch.randn(2, 3, 11)
    expected = ops.aft_conv(query, key, value, weight, **options)
    convolved, convolve = [], inference_convolution.convolve
    monkeypatch.setattr(
        inference_convolution,
        'convolve',
        lambda x, kernel: convolved.append(len(x)) or convolve(x, kernel),
    )
    monkeypatch.setattr(
        inference_convolution, 'NUMBERS_AT_A_TIME', at_a_time / torch.get_num_threads()
    )
    with torch.no_grad():
        got = ops.aft_conv(query, key, value, weight, **options)
    assert sum(convolved) == 5 and max(convolved) <= max(1, at_a_time // (35 * 8))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
    assert not got[2].any()


@pytest.mark.parametrize(
    ('largest', 'roundings'), [(0.5, 1.5), (LARGEST_ROUNDED_BIAS, 2), (LARGEST_ROUNDED_BIAS + 1, 1)]
)
@pytest.mark.parametrize('offset', [0, 1])
def test_bfloat16_errs_by_two_roundings_at_most(largest, roundings, offset, monkeypatch):
    """Of numbers as large as the largest; biases all over the range, values around `offset`."""
    monkeypatch.setattr(inference_convolution, 'multiplies_bfloat16', lambda: True)
    query, key, value = tokens(2, (14, 14), 48, 16, torch.bfloat16)
    value = (offset + value * (0.1 if offset else 1)).bfloat16()
    weight = torch.empty(16, 11, 11).uniform_(-2.9, largest)
    weight[0, 0, 0] = largest
    tensors = (query, key, value, weight)
    with torch.no_grad():
        exact = ops.aft_conv(*(x.double() for x in tensors), grid=(14, 14))
        got = ops.aft_conv(*tensors, grid=(14, 14))
    assert got.dtype == torch.bfloat16
    rounding = 2**-8 * exact.abs().max()
    assert (got.double() - exact).abs().max() <= roundings * rounding


def test_a_constant_kernel_is_prepared_once_per_use(monkeypatch):
    made, prepare = [], inference_convolution.with_fast_columns
    monkeypatch.setattr(
        inference_convolution,
        'with_fast_columns',
        lambda kernel: made.append(kernel.shape) or prepare(kernel),
    )
    weight = ops.constant(torch.randn(2, 3, 5))
    for grid, channels in [((4, 6), 4), ((4, 6), 4), ((6, 4), 4), ((4, 2), 4), ((4, 6), 8)]:
        inputs = tokens(2, grid, channels, 2)
        with torch.no_grad():
            got = ops.aft_conv(*inputs, weight, grid=grid)
            anew = ops.aft_conv(*inputs, weight.clone(), grid=grid)
        assert torch.equal(got, anew)
    # Those of copies, and of the constant: one, one for a grid of two columns, one for 8 channels.
    assert len(made) == 5 + 3


def test_forward_mode_passes_without_a_gradient():
    tensors = [*tokens(2, (3, 4), 4, 2), torch.randn(2, 3, 3)]
    tensors = [x.double() for x in tensors]
    tangents = [torch.randn_like(x) for x in tensors]

    def run(*x):
        return ops.aft_conv(*x, grid=(3, 4))

    expected = torch.func.jvp(run, tuple(tensors), tuple(tangents))[1]
    with torch.no_grad(), forward_ad.dual_level():
        duals = [forward_ad.make_dual(*pair) for pair in zip(tensors, tangents, strict=True)]
        assert_close([forward_ad.unpack_dual(run(*duals)).tangent], [expected], 1e-10)
