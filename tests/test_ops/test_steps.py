"""Steps, one token at a time, return the rows of the parallel causal op."""

import pytest
import torch

from aft_mm import ops
from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE, OPS

from .cases import CHANNELS, STEP_CASES


def key_function(options):
    return {k: v for k, v in options.items() if k == 'key_function'}


def start(case, batch, dtype, device=None):
    options = {k: v for k, v in case.options.items() if k != 'causal'}
    sizes = {k: v for k, v in options.items() if k in ('window', 'grid', 'key_function')}
    if case.op == 'aft_full':
        sizes = dict(num_tokens=case.tokens)
    if case.op == 'aft_conv':
        sizes.update(num_heads=case.heads, kernel_size=case.parameters[0][1:])
    init = getattr(ops, f'{case.op}_init_state')
    return init(batch, case.channels, **sizes, dtype=dtype, device=device), options


@pytest.mark.parametrize('key_scale', [1, 1000])
@pytest.mark.parametrize('case', STEP_CASES, ids=lambda case: case.name)
def test_steps_equal_the_parallel_form(case, key_scale):
    torch.manual_seed(0)
    query, key, value, *bias = (part.detach() for part in case.inputs())
    key = key * key_scale
    state, options = start(case, 2, torch.float64)
    step = getattr(ops, f'{case.op}_step')
    rows = []
    for token in range(case.tokens):
        assert (state.position == token).all()
        row, state = step(state, query[:, token], key[:, token], value[:, token], *bias, **options)
        rows.append(row)
    torch.testing.assert_close(torch.stack(rows, 1), case(query, key, value, *bias))


NORMALISED = [case for case in STEP_CASES if 'relu' not in case.name]


@pytest.mark.parametrize('offset', [0, 1e4, -1e4])
@pytest.mark.parametrize('case', NORMALISED, ids=lambda case: case.name)
def test_float32_steps_are_exact_for_shifted_keys(case, offset):
    torch.manual_seed(0)
    query, key, value, *bias = (part.detach() for part in case.inputs(bias_scale=3.0))
    # Both are compared on the shifted keys as float32 rounds them.
    key = (key + offset).float().double()
    expected = case(query, key, value, *bias)
    state, options = start(case, 2, torch.float32)
    step = getattr(ops, f'{case.op}_step')
    low = [part.float() for part in (query, key, value)]
    bias = [part.float() for part in bias]
    for token in range(case.tokens):
        row, state = step(state, *(part[:, token] for part in low), *bias, **options)
        error = (row.double() - expected[:, token]).abs().max()
        assert error < 2e-5, token


@pytest.mark.parametrize('op', ['aft_local', 'aft_local_learned'])
def test_bias_of_steps_is_float32(op):
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 9, CHANNELS).bfloat16().unbind()
    pos = torch.randn(2, 9, 3).mul(2).bfloat16().unbind()
    expected = getattr(ops, op)(query, key, value.float(), *pos, window=4, causal=True)
    state = getattr(ops, f'{op}_init_state')(2, CHANNELS, window=4)
    with torch.autocast('cpu', torch.bfloat16):
        for t in range(9):
            row = query[:, t], key[:, t], value[:, t].float()
            y, state = getattr(ops, f'{op}_step')(state, *row, *pos, window=4)
            torch.testing.assert_close(y, expected[:, t], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize('lengths', [(0, 0), (1, 1), (0, 5), (60, 31)], ids=str)
@pytest.mark.parametrize('case', STEP_CASES, ids=lambda case: case.name)
def test_steps_continue_prompts_of_different_lengths(case, lengths):
    torch.manual_seed(0)
    query, key, value, *bias = (part.detach() for part in case.inputs())
    expected = case(query, key, value, *bias)
    lengths = torch.tensor(lengths).clamp_max(case.tokens - 1)
    start_state, options = start(case, 2, torch.float64)
    padding = torch.arange(case.tokens)[None, :, None] >= lengths[:, None, None]
    hidden = [part.masked_fill(padding, torch.nan) for part in (key, value)]
    state = ops.prefill(start_state, *hidden, lengths, **key_function(options))
    step = getattr(ops, f'{case.op}_step')
    each = torch.arange(2)
    for n in range(case.tokens - int(lengths.max())):
        token = lengths + n
        row = [part[each, token] for part in (query, key, value)]
        y, state = step(state, *row, *bias, **options)
        torch.testing.assert_close(y, expected[each, token])
        assert (state.position == token + 1).all()


def test_invalid_prompts_are_refused():
    state = ops.aft_simple_init_state(2, CHANNELS)
    key, value = torch.randn(2, 2, 3, CHANNELS)
    with pytest.raises(ValueError, match=r'2 ints of 0 to 3, got \[1, 4\]'):
        ops.prefill(state, key, value, torch.tensor([1, 4]))
    with pytest.raises(ValueError, match=r'2 ints of 0 to 3, got \[1\]'):
        ops.prefill(state, key, value, torch.tensor([1]))
    with pytest.raises(ValueError, match=r'L ≥ 1 .* got \[2, 0, 6\]'):
        ops.prefill(state, key[:, :0], value[:, :0], torch.tensor([0, 0]))
    with pytest.raises(ValueError, match=r'\[2, L, 6\] and \[2, L, 6\] .* got \[2, 3, 5\]'):
        ops.prefill(state, key[..., 1:], value, torch.tensor([1, 1]))
    with pytest.raises(ValueError, match=r"the key_function of the step, 'relu2'"):
        ops.prefill(state, key, value, torch.tensor([1, 1]), key_function='relu2')
    lengths = torch.tensor([0, 3])
    state = ops.prefill(state, key, value, lengths)
    lengths += 1  # belongs to the caller, not to the state
    with pytest.raises(ValueError, match=r'fresh for prefill, got one at \[0, 3\]'):
        ops.prefill(state, key, value, torch.tensor([1, 1]))


def numbers(state):
    return sum(part.numel() for part in (*state.sums, state.keys, state.values))


def test_state_size_does_not_depend_on_the_length():
    simple = ops.aft_simple_init_state(1, CHANNELS)
    local = ops.aft_local_init_state(1, CHANNELS, window=4)
    size = numbers(local)
    pos = torch.randn(50, 2), torch.randn(50, 2)
    assert numbers(simple) == 3 * CHANNELS
    for _ in range(50):
        token = torch.randn(3, 1, CHANNELS).unbind()
        simple = ops.aft_simple_step(simple, *token)[1]
        local = ops.aft_local_step(local, *token, *pos, window=4)[1]
    assert numbers(simple) == 3 * CHANNELS and numbers(local) == size == (3 + 2 * 4) * CHANNELS


def test_sums_of_bfloat16_steps_are_float32():
    state = ops.aft_simple_init_state(2, CHANNELS)
    row, state = ops.aft_simple_step(state, *torch.randn(3, 2, CHANNELS).bfloat16().unbind())
    assert row.dtype == torch.bfloat16 and state.sums.numerator.dtype == torch.float32


def test_token_past_the_last_position_is_refused():
    token = torch.randn(3, 1, CHANNELS).unbind()
    state = ops.aft_full_init_state(1, CHANNELS, 1)
    state = ops.aft_full_step(state, *token, torch.zeros(1, 1))[1]
    with pytest.raises(ValueError, match='hold 1 tokens, got one more'):
        ops.aft_full_step(state, *token, torch.zeros(1, 1))
    with pytest.raises(ValueError, match='hold 1 tokens, got one more'):
        ops.aft_local_step(state, *token, torch.zeros(1, 1), torch.zeros(1, 1), window=1)


def test_state_of_another_op_or_size_is_refused():
    state = ops.aft_local_init_state(1, CHANNELS, window=3)
    query, key, value = torch.randn(3, 1, CHANNELS).unbind()
    pos = torch.randn(2, 9, 2).unbind()
    with pytest.raises(ValueError, match=r'must be \[1, 6\] and \[1, 6\] as the state'):
        ops.aft_local_step(state, query, key[:, :1], value, *pos, window=3)
    with pytest.raises(ValueError, match='which need 5 tokens, but it holds 3'):
        ops.aft_local_step(state, query, key, value, *pos, window=5)
    with pytest.raises(ValueError, match=r'must be \[9, 3\], a column per offset .* got \[9, 2\]'):
        ops.aft_local_step(state, query, key, value, pos[0], window=3)


def test_state_of_another_key_function_is_refused():
    token = torch.randn(3, 1, CHANNELS).unbind()
    state = ops.aft_simple_init_state(1, CHANNELS)
    with pytest.raises(ValueError, match="'relu2', which sums 12 channels, but it holds 6"):
        ops.aft_simple_step(state, *token, key_function='relu2', gate='relu')
    with pytest.raises(ValueError, match="gate must be 'relu' for .*'relu2', got 'sigmoid'"):
        ops.aft_simple_step(state, *token, key_function='relu2')
    state = ops.aft_simple_init_state(1, CHANNELS, key_function='relu2')
    with pytest.raises(ValueError, match="'relu', which sums 6 channels, but it holds 12"):
        ops.aft_simple_step(state, *token, key_function='relu')


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
