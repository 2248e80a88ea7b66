"""Mathematical invariants of the ops, which hold for every backend."""

import pytest
import torch

from aft_mm import ops
from aft_mm.ops.geometry import kernel_index, near_mask

from ..helpers import each
from .cases import CASES, indices, randn


@each('case', [c for c in CASES if c.weights_sum_to_one])
def test_constant_value_passes_through(case):
    query, key, value, *bias = case.inputs()
    value = value[:, :1].expand_as(value)
    expected = torch.sigmoid(query) * value[:, :1]
    torch.testing.assert_close(case(query, key, value, *bias), expected)


NORMALISED = [case for case in CASES if 'key_function' not in case.options]


@each('case', NORMALISED)
def test_key_shift_per_channel_changes_nothing(case):
    query, key, value, *bias = case.inputs()
    shifted = key + 50 * randn(key.shape[-1])
    torch.testing.assert_close(case(query, shifted, value, *bias), case(query, key, value, *bias))


@pytest.mark.parametrize('causal', [False, True])
def test_bias_shift_per_row_changes_nothing(causal):
    query, key, value, bias = randn(2, 9, 4), randn(2, 9, 4), randn(2, 9, 4), randn(9, 9)
    shifted = bias + 100 * randn(9, 1)
    torch.testing.assert_close(
        ops.aft_full(query, key, value, shifted, causal=causal),
        ops.aft_full(query, key, value, bias, causal=causal),
    )


@pytest.mark.parametrize('causal', [False, True])
def test_zero_bias_collapses_to_simple(causal):
    query, key, value = randn(2, 24, 6), randn(2, 24, 6), randn(2, 24, 6)
    zeros = key.new_zeros
    expected = ops.aft_simple(query, key, value, causal=causal)
    shared = dict(causal=causal)
    for got in (
        ops.aft_full(query, key, value, zeros(24, 24), **shared),
        ops.aft_local(query, key, value, zeros(24, 2), zeros(24, 2), window=5, **shared),
        ops.aft_local(query, key, value, randn(24, 2), randn(24, 2), window=0, **shared),
        ops.aft_conv(query, key, value, zeros(6, 3, 5), grid=(4, 6), **shared),
    ):
        torch.testing.assert_close(got, expected)
    if causal:
        torch.testing.assert_close(ops.aft_local_hard(query, key, value, window=24), expected)


@each('causal', [False, True])
@each('tokens, window, grid', [(63, 5, None), (70, 100, None), (110, (2, 4), (11, 10))])
def test_local_is_full_with_the_banded_bias(tokens, window, grid, causal):
    query, key, value = randn(2, tokens, 4), randn(2, tokens, 4), randn(2, tokens, 4)
    pos_u, pos_v = randn(tokens, 3), randn(tokens, 3)
    near = near_mask(*indices(tokens), window, grid)
    torch.testing.assert_close(
        ops.aft_local(query, key, value, pos_u, pos_v, window=window, grid=grid, causal=causal),
        ops.aft_full(query, key, value, (pos_u @ pos_v.T).where(near, 0), causal=causal),
    )


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize(
    'grid, kernel', [((4, 5), (3, 5)), ((3, 4), (9, 9)), ((2, 3, 4), (3, 3, 3))]
)
def test_conv_is_full_with_the_toeplitz_bias_per_head(grid, kernel, causal):
    tokens, heads = torch.Size(grid).numel(), 2
    query, key, value = randn(2, tokens, 6), randn(2, tokens, heads), randn(2, tokens, 6)
    weight = randn(heads, *kernel)
    index = kernel_index(*indices(tokens), kernel, grid)
    expected = []
    for head, channels in enumerate(torch.arange(6).chunk(heads)):
        bias = weight[head].flatten()[index.clamp_min(0)].where(index >= 0, 0)
        head_key = key[..., head : head + 1].expand(-1, -1, len(channels))
        parts = (query[..., channels], head_key, value[..., channels])
        expected.append(ops.aft_full(*parts, bias, causal=causal))
    got = ops.aft_conv(query, key, value, weight, grid=grid, causal=causal)
    torch.testing.assert_close(got, torch.cat(expected, -1))


@each('causal', [False, True])
@each('tokens, window', [(7, 1), (63, 5), (131, 40), (9, 30)])
@each('op', [ops.aft_local, ops.aft_local_learned])
def test_free_bias_can_represent_a_factorised_one(op, tokens, window, causal):
    query, key, value = randn(2, tokens, 4), randn(2, tokens, 4), randn(2, tokens, 4)
    pos_u, pos_v = randn(tokens, 3), randn(tokens, 3)
    target, source = indices(tokens)
    dense, column = pos_u @ pos_v.T, window - 1 + source - target
    # Entries of the bias outside of the sequence are not used.
    free = torch.full((tokens, window if causal else 2 * window - 1), 30.0, dtype=torch.float64)
    inside = (column >= 0) & (column < free.shape[1])
    free[target.expand_as(column)[inside], column[inside]] = dense[inside]
    shared = dict(window=window, causal=causal)
    torch.testing.assert_close(
        op(query, key, value, free, None, **shared), op(query, key, value, pos_u, pos_v, **shared)
    )


@pytest.mark.parametrize('causal', [False, True])
def test_one_row_grid_is_one_dimensional(causal):
    query, key, value, tall = (randn(2, 40, 4) for _ in range(4))
    pos = randn(40, 3), randn(40, 3)
    shared = dict(causal=causal)
    torch.testing.assert_close(
        ops.aft_local(query, key, value, *pos, window=(1, 7), grid=(1, 40), **shared),
        ops.aft_local(query, key, value, *pos, window=7, **shared),
    )
    weight = randn(4, 5)
    torch.testing.assert_close(
        ops.aft_conv(query, key, value, weight[:, None], grid=(1, 40), **shared),
        ops.aft_conv(query, key, value, weight, grid=(40,), **shared),
    )
    if causal:
        torch.testing.assert_close(
            ops.aft_local_hard(query, key, value, window=(2, 14), grid=(1, 40)),
            ops.aft_local_hard(query, key, value, window=7),
        )


def test_distant_tokens_count_in_local_and_conv_but_not_in_local_hard():
    key, value = randn(1, 30, 4), randn(1, 30, 4)
    changed = value.clone()
    changed[:, 0] += 1
    options = dict(gate='none', causal=True)

    def moved(op, *bias, key=key, **extra):
        difference = op(None, key, changed, *bias, **extra) - op(None, key, value, *bias, **extra)
        return difference[:, -1].abs().max() > 1e-6

    pos = randn(30, 2), randn(30, 2)
    weight = randn(4, 3)
    assert moved(ops.aft_local, *pos, window=3, **options)
    assert moved(ops.aft_conv, weight, grid=(30,), **options)
    assert not moved(ops.aft_conv, weight, grid=(30,), global_connectivity=False, **options)
    assert not moved(ops.aft_local_hard, window=3, **options)
    assert moved(ops.aft_local_learned, *pos, window=3, **options)


@each('causal', [False, True])
@each('window', [0, 1, 4, 30])
def test_local_learned_is_the_product_of_two_softmax(window, causal):
    """Eq. 8 of the ICLR submission: a softmax of the bias, 0 outside the window, and one of k."""
    tokens = 13
    query, key, value = randn(2, tokens, 4), randn(2, tokens, 4), randn(2, tokens, 4)
    pos_u, pos_v = randn(tokens, 3), randn(tokens, 3)
    got = ops.aft_local_learned(
        query, key, value, pos_u, pos_v, window=window, causal=causal, gate='relu'
    )
    target, source = indices(tokens)
    bias = (pos_u @ pos_v.T) * ((target - source).abs() < window)
    for t in range(tokens):
        end = t + 1 if causal else tokens
        local = bias[t, :end].softmax(0)[None, :, None]
        expected = (local * key[:, :end].softmax(1) * value[:, :end]).sum(1)
        torch.testing.assert_close(got[:, t], query[:, t].relu() * expected)


@pytest.mark.parametrize('causal', [False, True])
def test_relu2_is_the_sum_of_the_rectified_products(causal):
    query, key, value = randn(2, 9, 4), randn(2, 9, 4), randn(2, 9, 4)
    expected = torch.relu(query[:, :, None] * key[:, None]) * value[:, None]
    if causal:
        expected = expected * torch.ones(9, 9).tril()[None, :, :, None]
    options = dict(causal=causal, gate='relu')
    got = ops.aft_simple(query, key, value, key_function='relu2', **options)
    torch.testing.assert_close(got, expected.sum(2).to(got))
    # The two signs of the query see different keys: one relu term has nothing where q < 0.
    one_term = ops.aft_simple(query, key, value, key_function='relu', **options)
    torch.testing.assert_close(got[query > 0], one_term[query > 0])
    assert (one_term[query < 0] == 0).all() and (got[query < 0] != 0).any()


@pytest.mark.parametrize('gate', ['sigmoid', 'relu', 'none'])
def test_gate(gate):
    query, key, value = randn(2, 7, 4), randn(2, 7, 4), randn(2, 7, 4)
    mixed = torch.softmax(key, 1).mul(value).sum(1, keepdim=True).expand(-1, 7, -1)
    gates = {'sigmoid': torch.sigmoid(query), 'relu': query.clamp_min(0), 'none': 1.0}
    query, expected = None if gate == 'none' else query, gates[gate] * mixed
    got = ops.aft_simple(query, key, value, gate=gate)
    torch.testing.assert_close(got, expected)
    got += 1  # its rows are separate memory
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(ops.apply_gate(query, mixed, gate), expected)


def test_simple_is_linear_attention_with_exponential_features_and_one_channel():
    """With D = 1 the weights are those of softmax attention whose logits are the keys."""
    key, value = randn(2, 9, 1), randn(2, 9, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        torch.ones_like(key), key, value, is_causal=True, scale=1.0
    )
    torch.testing.assert_close(ops.aft_simple(None, key, value, causal=True, gate='none'), expected)
