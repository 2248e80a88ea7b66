"""Decoding steps of the Triton backend, compared with eager steps in float64."""

import dataclasses
import functools

import pytest
import torch

from aft_mm import ops
from aft_mm.ops import cases
from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE
from aft_mm.ops.state import USED_UP
from aft_mm.ops.triton import availability as triton_availability

from ..helpers import nightly
from .cases import CHANNELS, STEP_CASES
from .test_steps import feed, start
from .triton_parity import DEVICE, MARKS, TOLERANCE, inputs

from aft_mm.ops.triton import steps as triton_step  # isort: skip - where Triton is
from aft_mm.ops.triton.block_sizes import find_block  # isort: skip

pytestmark = MARKS
# Cases that are the same for steps as others.
SIMILAR = ('full-7x7-causal=True', 'local-7-s=20-causal=True', 'local-free-63-s=33-causal=True')
SERVED = [
    case
    for case in STEP_CASES
    if f'{case.op}_step' in triton_availability.KERNELS
    and 'relu' not in case.name
    and case.name not in SIMILAR
]
# One of each kind of bias, small.
KINDS = {
    'simple': cases.simple(9, causal=True),
    'full': cases.full(9),
    'local': cases.local(9, 4, rank=5),
    'local free': cases.local(9, 4, causal=True, rank=0),
    'local 2-d': cases.local(12, (2, 2), (3, 4), rank=5),
    'conv': cases.conv((9,), (5,)),
    'conv 2-d': cases.conv((3, 4), (3, 3), heads=3),
    'conv alone': cases.conv((3, 4), (3, 3), heads=6, global_connectivity=False),
    'window': cases.hard(9, 4),
    'window 2-d': cases.hard(12, (4, 4), (3, 4)),
}
some_kinds = pytest.mark.parametrize('case', list(KINDS.values())[::3], ids=list(KINDS)[::3])
FIRST = 'simple', 'full'
every_kind = pytest.mark.parametrize('name', nightly(KINDS, lambda name: name not in FIRST))


def check(case, tensors, monkeypatch, lengths=(0, 3, 1), count=4):
    dtype = tensors[2].dtype
    rows, state = feed(case, tensors, lengths, count)
    wide = [None if x is None else x.double() for x in tensors]
    with monkeypatch.context() as patch:
        patch.setenv(ENVIRONMENT_VARIABLE, 'eager')
        expected, reference = feed(case, wide, lengths, count, torch.float64)
    close = dict(rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert rows.dtype == dtype
    torch.testing.assert_close(rows.double(), expected, **close)
    assert torch.equal(state.position, reference.position)
    assert torch.equal(state.keys.double(), reference.keys)
    assert torch.equal(state.values.double(), reference.values)
    for part, wide in zip(state.sums, reference.sums, strict=True):
        # Empty slots have the lowest number of the dtype.
        wide = wide.clamp_min(torch.finfo(torch.float32).min)
        torch.testing.assert_close(part.double(), wide, rtol=2e-5, atol=2e-5)
    return rows, state


@pytest.mark.parametrize('case', SERVED, ids=lambda case: case.name)
def test_steps_match_eager(case, monkeypatch):
    """Prompts of different lengths, full buffers and the last token of the grid among them."""
    count = min(case.tokens, 3)
    lengths = (case.tokens - count, 0, (case.tokens - count) // 2)
    check(case, inputs(case, 3), monkeypatch, lengths, count)


@some_kinds
def test_from_the_first_token_to_the_last(case, monkeypatch):
    check(case, inputs(case, 1), monkeypatch, (0,), case.tokens)


@pytest.mark.parametrize(
    'name, dtype',
    [
        ('simple', torch.float16),
        ('simple', torch.bfloat16),
        ('local', torch.float16),
        ('conv 2-d', torch.bfloat16),
        ('window 2-d', torch.float16),
    ],
)
def test_types(name, dtype, monkeypatch):
    check(KINDS[name], inputs(KINDS[name], 3, dtype), monkeypatch, (0, 7, 4), 2)


@pytest.mark.parametrize(
    'name, kind',
    nightly(
        [(name, ('raised', 'spread', 'spike')[n % 3]) for n, name in enumerate(KINDS)]
        + [('simple', 'spike')],
        lambda name, kind: name not in FIRST,
    ),
)
def test_keys_of_any_size(name, kind, monkeypatch):
    case = KINDS[name]
    # Next to a key of 1e4 small biases may be lost; elsewhere they are of up to ±80.
    large = 4.0 if len(case.parameters) == 2 else 25.0
    scale = 1.0 if kind == 'raised' else large
    query, key, value, *bias = inputs(case, 2, bias_scale=scale)
    key = {
        'raised': key + 1e4,
        'spread': key * 1e4,
        'spike': key + 1000 * (torch.arange(case.tokens, device=DEVICE) == 5)[:, None],
    }[kind]
    check(case, [query, key, value, *bias], monkeypatch, (0, 4), 3)


@pytest.mark.parametrize(
    'name, gate', [('simple', 'relu'), ('simple', 'none'), ('local', 'none'), ('local', 'silu')]
)
def test_gates(name, gate, monkeypatch):
    case = dataclasses.replace(KINDS[name], options={**KINDS[name].options, 'gate': gate})
    query, *others = inputs(case, 2)
    check(case, [None if gate == 'none' else query, *others], monkeypatch, (0, 5), 2)


# Heads of one channel, of a few, and of more than a block.
@pytest.mark.parametrize('heads', [70, 14, 1])
def test_channels_that_are_not_a_multiple_of_the_block(heads, monkeypatch):
    case = cases.conv((3, 4), (3, 3), heads, channels=70)
    check(case, inputs(case, 2), monkeypatch, (0, 8), 3)


def test_buffers_of_more_than_a_tile(monkeypatch):
    block = find_block('buffer_step', torch.device(DEVICE))
    rows, rank = block.most_rows, block.rank + 3
    tokens = 2 * rows + 9
    full = cases.full(tokens)
    query, key, value, bias = inputs(full, 2)
    # Only tokens of one lane are visible, with biases that a key of 1e4 would round away.
    bias[:, torch.arange(tokens) % rows != 3] -= 60
    tensors = [query, key + 1e4, value, bias]
    check(full, tensors, monkeypatch, (rows + 2, tokens - 2), 2)
    local = cases.local(tokens, rows + 6, rank=rank)
    check(local, inputs(local, 2), monkeypatch, (tokens - 3, rows + 4), 3)
    conv = cases.conv((3, 40), (5, 3))  # the kernel reaches two rows back
    check(conv, inputs(conv, 2), monkeypatch, (117, 70), 3)


def strange(x):
    """Return an equal tensor with channels first in memory and a stride of two."""
    spaced = torch.full((2 * x.shape[-1], *x.shape[:-1]), torch.nan).to(x)
    spaced[::2] = x.movedim(-1, 0)
    return spaced[::2].movedim(0, -1)


@every_kind
def test_layouts(name):
    case = KINDS[name]
    tensors = inputs(case, 2)
    expected, _ = feed(case, tensors, (0, 6), 2)
    other = [strange(x) for x in tensors]
    assert not any(x.is_contiguous() for x in other)
    assert torch.equal(feed(case, other, (0, 6), 2)[0], expected)


@some_kinds
def test_the_state_is_updated_in_place_whatever_its_layout(case):
    query, key, value, *bias = inputs(case, 2)
    state, options = start(case, 2, torch.float32, DEVICE)
    state = state._replace(
        sums=type(state.sums)(*map(strange, state.sums)),
        keys=strange(state.keys),
        values=strange(state.values),
    )
    step, rows = getattr(ops, f'{case.op}_step'), []
    for t in range(6):
        before = state
        row, state = step(state, query[:, t], key[:, t], value[:, t], *bias, **options)
        rows.append(row)
        same = zip((*state.sums, *state[1:3]), (*before.sums, *before[1:3]), strict=True)
        assert all(a is b for a, b in same)
        # Other programs still read the position before; on a CPU it is marked once they are done.
        assert state.position is not before.position and (state.position == t + 1).all()
        assert (before.position == (USED_UP if DEVICE == 'cpu' else t)).all()
    expected, _ = feed(case, [query, key, value, *bias], (0, 0), 6)
    assert torch.equal(torch.stack(rows, 1), expected)


@some_kinds
def test_empty_slots_may_hold_anything(case):
    tensors = inputs(case, 2)
    expected, _ = feed(case, tensors, (0, 0), 3)
    query, key, value, *bias = tensors
    state, options = start(case, 2, torch.float32, DEVICE)
    state.keys.fill_(torch.nan)
    state.values.fill_(torch.nan)
    for t in range(3):
        token = query[:, t], key[:, t], value[:, t]
        row, state = getattr(ops, f'{case.op}_step')(state, *token, *bias, **options)
        assert torch.equal(row, expected[:, t])


@every_kind
def test_hidden_keys_have_no_influence(name, monkeypatch):
    case = KINDS[name]
    query, key, value, *bias = inputs(case, 2)
    key[:, :2] = -torch.inf
    rows, _ = check(case, [query, key, value, *bias], monkeypatch, (0, 0), 3)
    assert (rows[:, :2] == 0).all() and (rows[:, 2] != 0).all()


def test_an_empty_batch():
    for case in (KINDS['simple'], KINDS['local']):
        rows, state = feed(case, inputs(case, 0), (), 1)
        assert rows.shape == (0, 1, CHANNELS) and state.position.shape == (0,)


def test_a_token_past_the_table_reads_nothing_beyond_it():
    """On a device only the kernel reads the position."""
    _, _, _, bias = inputs(KINDS['full'], 3)
    state, _ = start(KINDS['full'], 1, torch.float32, DEVICE)
    state.position.fill_(9)
    token = torch.randn(3, 1, CHANNELS, device=DEVICE).unbind()
    row, state = triton_step.aft_full_step(state, *token, bias, gate='sigmoid')
    assert (row == 0).all() and state.position == 10


GATES = [
    ('simple', 'sigmoid'),
    ('simple', 'none'),
    ('full', 'sigmoid'),
    ('local 2-d', 'none'),
    ('conv 2-d', 'sigmoid'),
]


@pytest.mark.parametrize('name, gate', nightly(GATES, lambda name, gate: name != 'conv 2-d'))
def test_opcheck(name, gate, monkeypatch):
    """Schema with what is written, fake kernel, compiled with dynamic shapes."""
    called = []

    def record(op, *parts):
        # A state is invalid after its step, and no slot has position −1.
        called.append((op, [x.clone() if isinstance(x, torch.Tensor) else x for x in parts]))
        return op(*parts)

    for kernel in ('simple_op', 'buffer_op'):
        op = getattr(triton_step, kernel)
        monkeypatch.setattr(triton_step, kernel, functools.partial(record, op))
    case = KINDS[name]
    tensors = inputs(case, 2)
    if gate == 'none':
        tensors[0] = None
        case = dataclasses.replace(case, options={**case.options, 'gate': gate})
    feed(case, tensors, (0, 5), 1)
    ((op, parts),) = called
    torch.library.opcheck(op, parts)


REFUSED = {
    "with key_function='softmax' only, got 'relu'": dict(key_function='relu'),
    'has steps for states of float32, got torch.float16': dict(dtype=torch.float16),
}


@pytest.mark.parametrize('reason', REFUSED)
def test_unsupported_inputs_are_refused(reason, monkeypatch):
    dtype = REFUSED[reason].get('dtype', torch.float32)
    options = {k: v for k, v in REFUSED[reason].items() if k != 'dtype'}
    state = ops.aft_simple_init_state(1, 4, **options, dtype=dtype, device=DEVICE)
    token = torch.randn(3, 1, 4, device=DEVICE).unbind()
    with pytest.raises(RuntimeError, match=reason):
        ops.aft_simple_step(state, *token, **options)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'triton,eager')
    row, _ = ops.aft_simple_step(state, *token, **options)
    assert row.shape == (1, 4)
