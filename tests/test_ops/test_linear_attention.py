"""Linear attention against its oracle: values, gradients, memory and steps."""

import pytest
import torch
from measuring import added_peak, in_fresh_process

from aft_mm import ops
from aft_mm.engine.allocator import return_freed_memory
from aft_mm.ops import dispatch
from aft_mm.ops.eager import linear

from ..errors import refuses
from ..helpers import each
from .test_backends import TOLERANCE, assert_close

HEADS, DIMS, CHANNELS = 3, 5, 4
MAPS = {
    'elu': 'elu',
    'relu': 'relu',
    'square': 'square',
    'softplus': torch.nn.functional.softplus,
    'pair': (torch.exp, lambda x: torch.cat((x.relu(), (-x).relu()), -1).square()[..., 1:6]),
    'more features': lambda x: torch.cat((x.relu(), (-x).relu()), -1),
}


def inputs(tokens, dtype=torch.float64, batch=2, sources=None):
    sources = sources or tokens
    shapes = (tokens, HEADS, DIMS), (sources, HEADS, DIMS), (sources, HEADS, CHANNELS)
    return [torch.randn(batch, *shape).to(dtype) for shape in shapes]


def run(tensors, backend, monkeypatch, **options):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    with monkeypatch.context() as patch:
        patch.setenv(dispatch.ENVIRONMENT_VARIABLE, backend)
        output = ops.linear_attention(*leaves, **options)
        assert output.dtype == tensors[2].dtype
        cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
        return [output.detach(), *torch.autograd.grad(output, leaves, cotangent.to(output))]


KINDS = [(name, dtype) for name in ('elu', 'pair') for dtype in TOLERANCE]
KINDS += [(name, torch.float64) for name in MAPS if name not in ('elu', 'pair')]


@each('masked', [False, True])
@each('feature_map, dtype', KINDS)
@each('tokens, causal', [(7, False), (1, True), (63, True), (700, True)])
def test_matches_oracle(tokens, causal, feature_map, dtype, masked, monkeypatch):
    """700 tokens of 2 sequences and 3 heads are two spans; the last chunk is incomplete."""
    monkeypatch.setattr(linear, 'STORED_ROWS', 2500)
    monkeypatch.setattr(linear, 'SPAN_ROWS', 2500)
    tensors = inputs(tokens, dtype)
    mask = torch.rand(2, tokens) < 0.7 if masked else None
    options = dict(feature_map=MAPS[feature_map], causal=causal, key_mask=mask)
    wide = run([x.double() for x in tensors], 'reference', monkeypatch, **options)
    # One token has the gradient 0 towards query and key: rounding is of the size of its terms.
    assert_close(run(tensors, 'eager', monkeypatch, **options), wide, TOLERANCE[dtype], floor=1)


def test_oracle_equals_the_recurrence_of_the_paper(monkeypatch):
    query, key, value = inputs(9)
    phi = [torch.nn.functional.elu(x) + 1 for x in (query, key)]
    s, z = torch.zeros(2, HEADS, DIMS, CHANNELS), torch.zeros(2, HEADS, DIMS)
    rows = []
    for t in range(9):
        s = s + torch.einsum('bhd,bhm->bhdm', phi[1][:, t], value[:, t])
        z = z + phi[1][:, t]
        rows.append(
            torch.einsum('bhd,bhdm->bhm', phi[0][:, t], s) / (phi[0][:, t] * z).sum(-1)[..., None]
        )
    got = run((query, key, value), 'reference', monkeypatch, causal=True)[0]
    torch.testing.assert_close(got, torch.stack(rows, 1))


def test_eps_is_added_to_the_denominator(monkeypatch):
    tensors = inputs(100)
    options = dict(causal=True, feature_map='elu')
    plain = run(tensors, 'eager', monkeypatch, **options)
    got = run(tensors, 'eager', monkeypatch, **options, eps=0.5)
    assert_close(got, run(tensors, 'reference', monkeypatch, **options, eps=0.5), 1e-10)
    assert (got[0] - plain[0]).abs().max() > 1e-2


@each('causal', [False, True])
@each('scale', [1e-15, 1e-6, 1e4, 1e8])
@each('feature_map', ['elu', 'relu', 'square'])
def test_features_of_any_size(feature_map, scale, causal, monkeypatch):
    tensors = inputs(70, torch.float32)
    tensors[0] *= scale
    if feature_map != 'square' or scale < 1e8:
        tensors[1] *= scale
    if feature_map == 'elu' and scale > 1:  # far below 0 its features are 0
        tensors[:2] = tensors[0].abs(), tensors[1].abs()
    options = dict(feature_map=feature_map, causal=causal)
    wide = run([x.double() for x in tensors], 'reference', monkeypatch, **options)
    # elu's features are 1 and a little: its gradients are differences of numbers of size 1.
    floor = 1 if feature_map == 'elu' else 1e-20
    assert_close(run(tensors, 'eager', monkeypatch, **options), wide, 1e-4, floor)


@pytest.mark.parametrize('causal', [False, True])
def test_very_negative_queries_and_keys_do_not_divide_by_zero(causal, monkeypatch):
    """``elu(x) + 1`` at −40 is 4e-18, which float32 loses in e^x − 1 + 1."""
    tensors = inputs(70, torch.float32)
    tensors[0] -= 40
    tensors[1] -= 40
    options = dict(feature_map='elu', causal=causal)
    wide = run([x.double() for x in tensors], 'reference', monkeypatch, **options)
    assert_close(run(tensors, 'eager', monkeypatch, **options), wide, 1e-4)


@pytest.mark.parametrize('causal', [False, True])
def test_zero_features_and_hidden_rows_give_zero(causal):
    query, key, value = inputs(70, torch.float32)
    query, key = query.abs(), key.abs()
    query[:, 3] = -1.0
    mask = torch.ones(2, 70, dtype=torch.bool)
    mask[1] = False
    key[1], value[1] = torch.nan, torch.inf
    leaves = [x.requires_grad_() for x in (query, key, value)]
    y = ops.linear_attention(*leaves, feature_map='relu', causal=causal, key_mask=mask)
    assert (y[:, 3] == 0).all() and (y[1] == 0).all() and (y[0, 10:] != 0).all()
    gradients = torch.autograd.grad(y.square().sum(), leaves)
    assert all(g.isfinite().all() and (g[1] == 0).all() for g in gradients)


def test_bfloat16_sums_are_float32():
    """A bfloat16 sum of 10,000 ones would stop at 256."""
    query, key = torch.zeros(2, 1, 10_000, 1, 1).bfloat16().unbind()
    value = torch.zeros_like(key)
    value[:, ::2] = 1
    y = ops.linear_attention(query, key, value, causal=True)
    assert y.dtype == torch.bfloat16 and abs(y[0, -1].item() - 0.5) < 4e-3


def peak_of_gradients() -> float:
    """Return the peak over query, key, value, output, and their gradients."""
    inputs = [torch.randn(1, 65_536, 2, 32, requires_grad=True) for _ in range(3)]
    cotangent = torch.randn_like(inputs[0])

    def gradients() -> None:
        y = ops.linear_attention(*inputs, causal=True)
        torch.autograd.grad(y, inputs, cotangent)

    gradients()  # the first call imports sympy, 32 MiB
    one = cotangent.nbytes / 2**20
    return (added_peak(gradients) + 4 * one) / (8 * one)  # four of them exist before the call


@pytest.mark.slow
def test_causal_gradient_saves_inputs_and_outputs_only():
    assert in_fresh_process(peak_of_gradients, malloc=return_freed_memory) <= 1.1


@each('lengths', [None, (0, 5), (60, 31)])
@each('feature_map', MAPS)
def test_steps_equal_the_parallel_form(feature_map, lengths):
    options = dict(feature_map=MAPS[feature_map])
    query, key, value = inputs(70)
    expected = ops.linear_attention(query, key, value, causal=True, **options)
    features = 2 * DIMS if feature_map == 'more features' else DIMS
    state = ops.linear_attention_init_state(2, HEADS, features, CHANNELS, dtype=torch.float64)
    assert state.s.shape == (2, HEADS, features, CHANNELS) and state.z.shape == state.s.shape[:3]
    size, each = state.sums.numel(), torch.arange(2)
    start = torch.tensor(lengths or (0, 0))
    if lengths is not None:
        padding = (torch.arange(70) >= start[:, None])[..., None, None]
        prompt = (x.masked_fill(padding, torch.nan) for x in (key, value))
        state = ops.linear_attention_prefill(state, *prompt, start, **options)
    for n in range(70 - int(start.max())):
        row = [x[each, start + n] for x in (query, key, value)]
        y, state = ops.linear_attention_step(state, *row, **options)
        torch.testing.assert_close(y, expected[each, start + n])
        assert (state.position == start + n + 1).all()
    assert state.sums.numel() == size


def test_compiles_as_one_graph():
    def call(*tensors):
        return ops.linear_attention(*tensors, causal=True)

    leaves = [x.requires_grad_() for x in inputs(200, torch.float32)]
    expected = call(*leaves)
    got = torch.compile(call, fullgraph=True, backend='aot_eager')(*leaves)
    torch.testing.assert_close(got, expected)
    for a, b in zip(*(torch.autograd.grad(y.sum(), leaves) for y in (got, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_a_graph_is_no_larger_for_more_tokens(monkeypatch):
    monkeypatch.setattr(linear, 'STORED_ROWS', 128)
    monkeypatch.setattr(linear, 'SPAN_ROWS', 128)
    sizes = []

    def backend(graph, example):
        sizes.append(len(graph.graph.nodes))
        return graph

    def call(*tensors):
        return ops.linear_attention(*tensors, causal=True)

    for tokens in (33, 1200):
        torch._dynamo.reset()
        tensors = inputs(tokens, torch.float32)
        got = torch.compile(call, fullgraph=True, backend=backend)(*tensors)
        torch.testing.assert_close(got, call(*tensors))
    assert sizes[0] == sizes[1]


def test_bad_input_raises_with_a_one_line_message():
    query, key, value = inputs(6)
    for bad, message in [
        (dict(feature_map='tanh'), "feature_map must be one of elu, relu, square, got 'tanh'"),
        (dict(feature_map=torch.tanh), "feature_map must not be negative, got -0.9.* from 'tanh'"),
        (dict(feature_map=torch.tanh, causal=True), 'feature_map must not be negative'),
        (dict(eps=-1.0), 'eps must be a finite number, 0 or larger, got -1.0'),
        (dict(causal='no'), "causal must be True or False, got 'no'"),
        (dict(key_mask=torch.ones(2, 5).bool()), r'key_mask must be bool \[2, 6\] .*\[2, 5\]'),
    ]:
        refuses(message, ops.linear_attention, query, key, value, **bad)
    message = r'must be a tensor of float64, .* got torch.int64 \[2, 6, 3, 4\]'
    refuses('value ' + message, ops.linear_attention, query, key, value.long())
    refuses('query must be a tensor .* got None', ops.linear_attention, None, key, value)
    message = 'key must be on cpu with the others, got meta'
    refuses(message, ops.linear_attention, query, key.to('meta'), value)
    message = 'num_heads must be an int, 1 or larger, got 0'
    refuses(message, ops.linear_attention_init_state, 2, 0, 5, 4)
    sizes = r'query must be \[B, T, h, d\], .* got '
    message = sizes + r'\[2, 6, 3, 4\], \[2, 6, 3, 5\] and'
    refuses(message, ops.linear_attention, query[..., :4], key, value)
    refuses(sizes, ops.linear_attention, query, key[:, :, :2], value[:, :, :2])
    message = 'same length here, got T=4 and S=6'
    refuses(message, ops.linear_attention, query[:, :4], key, value, causal=True)


def test_state_of_another_op_or_batch_is_refused():
    tokens = inputs(3)
    query, key, value = (x[:, 0] for x in tokens)
    other, state = (
        ops.aft_simple_init_state(2, 6),
        ops.linear_attention_init_state(2, HEADS, DIMS, CHANNELS),
    )
    step, prefill = ops.linear_attention_step, ops.linear_attention_prefill
    refuses('state must be a LinearState, got StepState', step, other, query, key, value)
    message = r'query and key must be \[2, 3, d\] and value \[2, 3, 4\] .* got '
    refuses(message + r'\[1, 3, 5\] and \[2', step, state, query[:1], key, value)
    refuses(message + r'\[2, 3, 5\] and \[1', step, state, query, key[:1], value[:1])
    refuses('value must be a tensor of float64', step, state, query, key, value.long())
    message = (
        r'\[2, L, 3, d\] and value \[2, L, 3, 4\] with sizes of 1 or more .* got \[2, 0, 3, 5\]'
    )
    refuses(message, prefill, state, *(x[:, :0] for x in tokens[1:]), torch.zeros(2).long())
    message = r'lengths must be a tensor of ints \[B\], got torch.float32'
    refuses(message, prefill, state, *tokens[1:], torch.tensor([1.5, 3]))
    message = r'2 ints of 0 to 3, got \[1, 4\]'
    refuses(message, prefill, state, *tokens[1:], torch.tensor([1, 4]))
    state = prefill(state, *tokens[1:], torch.tensor([1, 3]))
    message = r'fresh for prefill, got one at \[1, 3\]'
    refuses(message, prefill, state, *tokens[1:], torch.tensor([1, 3]))


def test_step_from_a_state_of_any_strides():
    rows = [x[:, 0] for x in inputs(1)]
    state = ops.linear_attention_init_state(2, 2 * HEADS, DIMS, CHANNELS, dtype=torch.float64)
    expected, _ = ops.linear_attention_step(
        state._replace(sums=state.sums[:, :HEADS].clone()), *rows
    )
    state = state._replace(sums=state.sums[:, :HEADS], position=torch.zeros(2).long())
    got, state = ops.linear_attention_step(state, *rows)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(ops.linear_attention_step(state, *rows)[0], expected)


def test_vmap_with_a_feature_map_of_the_caller():
    def call(*tensors):
        return ops.linear_attention(*tensors, feature_map=torch.exp)

    tensors = [torch.stack([x, -x]) for x in inputs(7)]
    expected = torch.stack([call(*x) for x in zip(*tensors, strict=True)])
    torch.testing.assert_close(torch.func.vmap(call)(*tensors), expected)


def test_empty_batch_has_gradients():
    tensors = [x.requires_grad_() for x in inputs(3, batch=0)]
    y = ops.linear_attention(*tensors, causal=True)
    assert y.shape == (0, 3, HEADS, CHANNELS)
    assert all(g is not None for g in torch.autograd.grad(y.sum(), tensors))


@pytest.mark.parametrize('stored', [0, 2**16], ids=['recomputed', 'stored'])
def test_second_derivatives_batched_gradients_and_torch_func(stored, monkeypatch):
    monkeypatch.setattr(linear, 'STORED_ROWS', stored)
    monkeypatch.setattr(linear, 'SPAN_ROWS', 300)
    leaves = [x.requires_grad_() for x in inputs(80)]
    mask = torch.rand(2, 80) < 0.8

    def call(*tensors):
        return ops.linear_attention(*tensors, causal=True, key_mask=mask)

    def derivatives(backend):
        monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, backend)
        output = call(*leaves)
        first = torch.autograd.grad(output.sin().sum(), leaves, create_graph=True)
        cotangents = torch.stack([torch.ones_like(output), output.detach()])
        return (
            *torch.autograd.grad(sum(x.cos().sum() for x in first), leaves),
            *torch.autograd.grad(call(*leaves), leaves, cotangents, is_grads_batched=True),
            torch.func.grad(lambda key: call(leaves[0], key, leaves[2]).square().sum())(leaves[1]),
        )

    for got, expected in zip(derivatives('eager'), derivatives('reference'), strict=True):
        torch.testing.assert_close(got, expected)
