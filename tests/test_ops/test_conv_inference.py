"""The inference form of AFT-conv: a few samples at a time, with the kernel of a plan."""

import pytest
import torch
from torch.autograd import forward_ad

from aft_mm import ops
from aft_mm.ops.eager import conv

from .test_numerics import assert_close

pytestmark = pytest.mark.usefixtures('eager')


def tokens(batch, grid, channels, heads):
    count = grid[0] * grid[1]
    query, value = torch.randn(2, batch, count, channels)
    return query, torch.randn(batch, count, heads), value


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('at_once', [1, 2 * 35 * 8, 4 * 35 * 8])
def test_parts_of_a_batch_equal_one_call(at_once, dtype, monkeypatch):
    query, key, value = (x.to(dtype) for x in tokens(5, (5, 7), 6, 2))
    mask = torch.rand(5, 35) > 0.3
    mask[2] = False
    key, value = (x.masked_fill(~mask.unsqueeze(-1), torch.nan) for x in (key, value))
    options = dict(grid=(5, 7), key_mask=mask)
    weight = torch.randn(2, 3, 11)
    expected = ops.aft_conv(query, key, value, weight, **options)
    convolved, convolve = [], conv.convolve
    monkeypatch.setattr(
        conv, 'convolve', lambda x, *rest: convolved.append(len(x)) or convolve(x, *rest)
    )
    monkeypatch.setattr(conv, 'TERMS_AT_ONCE', at_once / torch.get_num_threads())
    with torch.no_grad():
        got = ops.aft_conv(query, key, value, weight, **options)
    assert sum(convolved) == 2 * 5 and max(convolved) <= max(1, at_once // (35 * 8))
    rounding = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(got, expected, rtol=rounding, atol=1e-7)
    assert not got[2].any()


def test_a_plan_computes_its_kernel_once(monkeypatch):
    made, prepare = [], conv.with_fast_columns
    monkeypatch.setattr(
        conv, 'with_fast_columns', lambda kernel: made.append(kernel.shape) or prepare(kernel)
    )
    weight = torch.randn(2, 3, 5)
    plan = ops.plan_conv(weight)
    for grid, channels in [((4, 6), 4), ((4, 6), 4), ((6, 4), 4), ((4, 2), 4), ((4, 6), 8)]:
        inputs = tokens(2, grid, channels, 2)
        with torch.no_grad():
            got = ops.aft_conv(*inputs, plan, grid=grid)
            expected = ops.aft_conv(*inputs, weight, grid=grid)
        assert torch.equal(got, expected)
    # 5 without a plan; of the plan one, one for a grid of two columns and one for 8 channels.
    assert len(made) == 5 + 3


def test_forward_mode_without_reverse_mode():
    tensors = [*tokens(2, (3, 4), 4, 2), torch.randn(2, 3, 3)]
    tensors = [x.double() for x in tensors]
    tangents = [torch.randn_like(x) for x in tensors]

    def run(*x):
        return ops.aft_conv(*x, grid=(3, 4))

    expected = torch.func.jvp(run, tuple(tensors), tuple(tangents))[1]
    with torch.no_grad(), forward_ad.dual_level():
        duals = [forward_ad.make_dual(*pair) for pair in zip(tensors, tangents, strict=True)]
        assert_close([forward_ad.unpack_dual(run(*duals)).tangent], [expected], 1e-10)
