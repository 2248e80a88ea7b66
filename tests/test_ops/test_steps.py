"""Steps, one token at a time, return the rows of the parallel causal op."""

import re

import pytest
import torch

from aft_mm import ops
from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE, OPS

from ..errors import refuses
from ..helpers import each
from .cases import CHANNELS, STEP_CASES


def start(case, batch, dtype, device=None):
    options = {k: v for k, v in case.options.items() if k != 'causal'}
    sizes = {k: v for k, v in options.items() if k in ('window', 'grid', 'key_function')}
    if case.op == 'aft_full':
        sizes = dict(num_tokens=case.tokens)
    if case.op == 'aft_conv':
        sizes.update(num_heads=case.heads, kernel_size=case.parameters[0][1:])
    init = getattr(ops, f'{case.op}_init_state')
    return init(batch, case.channels, **sizes, dtype=dtype, device=device), options


def feed(case, tensors, lengths, count, dtype=torch.float32):
    """Return the rows [B, n, D] of `count` steps after prompts of these lengths, and the state."""
    query, key, value, *bias = tensors
    state, options = start(case, len(value), dtype, value.device)
    each = torch.arange(len(value), device=value.device)
    token = torch.zeros_like(each)
    if lengths:
        token = torch.tensor(lengths, device=value.device)
        padding = torch.arange(case.tokens, device=value.device)[:, None] >= token[:, None, None]
        prompt = (x.masked_fill(padding, torch.nan) for x in (key, value))
        kind = {k: v for k, v in options.items() if k == 'key_function'}
        if case.op == 'aft_decay':
            kind['decay'] = bias[0]
        state = ops.prefill(state, *prompt, token, **kind)
    step, rows = getattr(ops, f'{case.op}_step'), []
    for n in range(count):
        assert (state.position == token + n).all()
        parts = [None if x is None else x[each, token + n] for x in (query, key, value)]
        row, state = step(state, *parts, *bias, **options)
        rows.append(row)
    return torch.stack(rows, 1), state


PROMPTS = [(1, None), (1000, None), (1, (0, 0)), (1, (1, 1)), (1, (0, 5)), (1, (60, 31))]


@each('key_scale, lengths', PROMPTS)
@each('case', STEP_CASES)
def test_steps_equal_the_parallel_form(case, key_scale, lengths):
    tensors = [part.detach() for part in case.inputs()]
    tensors[1] *= key_scale
    first = torch.tensor(lengths or (0, 0)).clamp_max(case.tokens - 1)
    count = case.tokens - int(first.max())
    rows, state = feed(case, tensors, lengths and first.tolist(), count, torch.float64)
    expected = case(*tensors)[torch.arange(2)[:, None], first[:, None] + torch.arange(count)]
    torch.testing.assert_close(rows, expected)
    assert (state.position == first + count).all()


NORMALISED = [case for case in STEP_CASES if 'relu' not in case.name]


@each('offset', [0, 1e4, -1e4])
@each('case', NORMALISED)
def test_float32_steps_are_exact_for_shifted_keys(case, offset):
    query, key, value, *bias = (part.detach() for part in case.inputs(bias_scale=3.0))
    # Both are compared on the shifted keys as float32 rounds them.
    key = (key + offset).float().double()
    expected = case(query, key, value, *bias)
    rows, _ = feed(case, [x.float() for x in (query, key, value, *bias)], None, case.tokens)
    assert (rows.double() - expected).abs().max() < 2e-5


@each('key_scale', [1, 100, 1e4])
@each('case', [c for c in STEP_CASES if len(c.parameters) == 1 and c.op != 'aft_decay'])
def test_a_bias_of_minus_infinity_hides_a_pair(case, key_scale):
    *tensors, bias = (part.detach() for part in case.inputs())
    tensors[1] *= key_scale
    tensors.append(bias.masked_fill(torch.rand(bias.shape) < 0.4, -torch.inf))
    if case.op != 'aft_conv':
        tensors[3][0] = -torch.inf  # the first token sees nothing
    rows, _ = feed(case, tensors, None, case.tokens, torch.float64)
    torch.testing.assert_close(rows, case(*tensors))


@each('prompt', [0, 5])
@each('key_scale', [1, 1e4, 1e12])
def test_steps_for_any_decay(key_scale, prompt):
    """Also before the first token, with a sum that the decay cannot move, and for λ = ∞."""
    decay = torch.tensor([0.3, -100, -1e3, 88.5, 1e30, torch.inf])
    key, value = torch.randn(2, 3, 9, len(decay)).unbind()
    key = key_scale * key
    key[0, :2, :5] = -torch.inf
    expected = ops.aft_decay(None, key, value, decay, gate='none')
    state = ops.aft_decay_init_state(3, len(decay))
    if prompt:
        lengths, tokens = torch.full((3,), prompt), (key[:, :prompt], value[:, :prompt])
        state = ops.prefill(state, *tokens, lengths, decay=decay)
    for t in range(prompt, 9):
        y, state = ops.aft_decay_step(state, None, key[:, t], value[:, t], decay, gate='none')
        torch.testing.assert_close(y, expected[:, t], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('first', [200.0, 1e4])
def test_a_token_far_above_the_window_keeps_all_weight(first):
    query, key, value = torch.randn(3, 1, 9, CHANNELS).unbind()
    key[:, 0] = first
    pos = torch.randn(2, 9, 3).unbind()
    expected = ops.aft_local(
        *(x.double() for x in (query, key, value, *pos)), window=2, causal=True
    )
    state = ops.aft_local_init_state(1, CHANNELS, window=2)
    for t in range(9):
        y, state = ops.aft_local_step(state, query[:, t], key[:, t], value[:, t], *pos, window=2)
        torch.testing.assert_close(y.double(), expected[:, t], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('op', ['aft_local', 'aft_local_learned'])
def test_bias_of_steps_is_float32(op):
    query, key, value = torch.randn(3, 2, 9, CHANNELS).bfloat16().unbind()
    pos = torch.randn(2, 9, 3).mul(2).bfloat16().unbind()
    expected = getattr(ops, op)(query, key, value.float(), *pos, window=4, causal=True)
    state = getattr(ops, f'{op}_init_state')(2, CHANNELS, window=4)
    with torch.autocast('cpu', torch.bfloat16):
        for t in range(9):
            row = query[:, t], key[:, t], value[:, t].float()
            y, state = getattr(ops, f'{op}_step')(state, *row, *pos, window=4)
            torch.testing.assert_close(y, expected[:, t], atol=1e-5, rtol=1e-4)


def test_invalid_prompts_are_refused():
    state = ops.aft_simple_init_state(2, CHANNELS)
    key, value = torch.randn(2, 2, 3, CHANNELS)
    one = torch.tensor([1, 1])
    for lengths in ([1, 4], [1]):
        message = f'2 ints of 0 to 3, got {re.escape(str(lengths))}'
        refuses(message, ops.prefill, state, key, value, torch.tensor(lengths))
    message = r'L ≥ 1 .* got \[2, 0, 6\]'
    refuses(message, ops.prefill, state, key[:, :0], value[:, :0], torch.tensor([0, 0]))
    message = r'\[2, L, 6\] and \[2, L, 6\] .* got \[2, 3, 5\]'
    refuses(message, ops.prefill, state, key[..., 1:], value, one)
    message = "the key_function of the step, 'relu2'"
    refuses(message, ops.prefill, state, key, value, one, key_function='relu2')
    lengths = torch.tensor([0, 3])
    state = ops.prefill(state, key, value, lengths)
    lengths += 1  # belongs to the caller, not to the state
    refuses(r'fresh for prefill, got one at \[0, 3\]', ops.prefill, state, key, value, one)


def test_sums_of_bfloat16_steps_are_float32():
    state = ops.aft_simple_init_state(2, CHANNELS)
    row, state = ops.aft_simple_step(state, *torch.randn(3, 2, CHANNELS).bfloat16().unbind())
    assert row.dtype == torch.bfloat16 and state.sums.numerator.dtype == torch.float32


def test_token_past_the_last_position_is_refused():
    token = torch.randn(3, 1, CHANNELS).unbind()
    state, zero = ops.aft_full_init_state(1, CHANNELS, 1), torch.zeros(1, 1)
    state = ops.aft_full_step(state, *token, zero)[1]
    message = 'state must hold at most 1 tokens, got one more'
    refuses(message, ops.aft_full_step, state, *token, zero)
    refuses(message, ops.aft_local_step, state, *token, zero, zero, window=1)


def test_state_of_another_op_size_or_key_function_is_refused():
    query, key, value = token = torch.randn(3, 1, CHANNELS).unbind()
    state = ops.aft_full_init_state(1, CHANNELS, 3)
    message = r'position_bias must be \[T, T\], got \[3, 2\]'
    refuses(message, ops.aft_full_step, state, *token, torch.zeros(3, 2))
    step, state = ops.aft_local_step, ops.aft_local_init_state(1, CHANNELS, window=3)
    pos = torch.randn(2, 9, 2).unbind()
    message = r'must be \[1, 6\] and \[1, 6\] as the state'
    refuses(message, step, state, query, key[:, :1], value, *pos, window=3)
    refuses('which need 5 tokens, but it holds 3', step, state, *token, *pos, window=5)
    message = r'must be \[9, 3\], a column per offset .* got \[9, 2\]'
    refuses(message, step, state, *token, pos[0], window=3)
    step, state = ops.aft_simple_step, ops.aft_simple_init_state(1, CHANNELS)
    message = "'relu2', which sums 12 channels, but it holds 6"
    refuses(message, step, state, *token, key_function='relu2', gate='relu')
    buffered = ops.aft_local_init_state(1, CHANNELS, window=3)
    refuses('which need 0 tokens, but it holds 3', step, buffered, *token)
    message = "gate must be 'relu' for .*'relu2', got 'sigmoid'"
    refuses(message, step, state, *token, key_function='relu2')
    state = ops.aft_simple_init_state(1, CHANNELS, key_function='relu2')
    message = "'relu', which sums 6 channels, but it holds 12"
    refuses(message, step, state, *token, key_function='relu')


@pytest.mark.parametrize('key_function', ['softmax', 'relu'])
def test_later_steps_do_not_change_an_output(key_function):
    token = torch.randn(3, 1, CHANNELS).abs().unbind()
    state = ops.aft_simple_init_state(1, CHANNELS, key_function=key_function)
    options = dict(key_function=key_function, gate='none')
    row, state = ops.aft_simple_step(state, None, *token[1:], **options)
    kept = row.clone()
    row.add_(1)  # nor the other way round
    following = ops.aft_simple_step(state, None, *token[1:], **options)[0]
    torch.testing.assert_close(row, kept + 1)
    weights = 1 if key_function == 'softmax' else 2
    torch.testing.assert_close(following, weights * kept)


def test_steps_have_no_gradient():
    state = ops.aft_local_hard_init_state(1, CHANNELS, window=2)
    token = torch.randn(3, 1, CHANNELS, requires_grad=True).unbind()
    row, state = ops.aft_local_hard_step(state, *token, window=2)
    assert not row.requires_grad and not state.keys.requires_grad


def test_step_without_a_table_compiles_as_one_graph():
    """On a CPU too, where the position of a state is only checked outside a graph."""
    tokens = [torch.randn(2, CHANNELS) for _ in range(3)]

    def step(state):
        return ops.aft_simple_step(state, *tokens)[0]

    expected = step(ops.aft_simple_init_state(2, CHANNELS))
    compiled = torch.compile(step, backend='eager', fullgraph=True)
    torch.testing.assert_close(compiled(ops.aft_simple_init_state(2, CHANNELS)), expected)


def test_every_causal_op_has_a_case():
    assert {case.op for case in STEP_CASES} == {*OPS} - {'linear_attention'}


def test_the_oracle_has_no_steps(monkeypatch):
    state, token = ops.aft_simple_init_state(1, CHANNELS), torch.randn(3, 1, CHANNELS).unbind()
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'reference')
    with pytest.raises(RuntimeError, match='aft_simple_step on cpu: .*reference: has no steps'):
        ops.aft_simple_step(state, *token)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'reference,eager')
    assert ops.aft_simple_step(state, *token)[0].shape == (1, CHANNELS)
