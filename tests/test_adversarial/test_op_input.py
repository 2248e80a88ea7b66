"""Wrong arguments of ops raise one-line errors that name the argument."""

import numpy as np
import pytest
import torch

from aft_mm import ops

from ..errors import refuses, refuses_value
from ..helpers import each, short
from ..test_ops.cases import CASES

pytestmark = pytest.mark.adversarial

B, T, D = 2, 6, 4
X = torch.randn(B, T, D)
SIMPLE = dict(query=X, key=X, value=X)
OPS = {case.op: case for case in reversed(CASES)}


def values():
    numbers = torch.randn(3, 4, 5)
    yield from (None, 5.0, 'x', [[1.0]], np.zeros((2, 3, 4)))
    for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
        yield numbers.to(dtype)
    yield numbers.to_sparse()
    yield torch.quantize_per_tensor(numbers, 0.1, 0, torch.quint8)
    yield torch.nested.nested_tensor([numbers[0], numbers[1]], layout=torch.jagged)


PARAMETERS = dict(
    aft_full=('position_bias',),
    aft_full_batched=('position_bias',),
    aft_local=('pos_u', 'pos_v'),
    aft_conv=('weight',),
    aft_local_learned=('pos_u', 'pos_v'),
)


@each('value', list(values()))
@pytest.mark.parametrize('op', OPS)
def test_tensors_of_every_op(op, value):
    case = OPS[op]
    names = 'query', 'key', 'value', *PARAMETERS.get(op, ())
    for index, name in enumerate(names):
        if value is None and name in ('query', 'pos_v'):
            continue
        tensors = case.inputs(dtype=torch.float32)
        tensors[index] = value
        refuses_value(name, case, *tensors)


@pytest.mark.parametrize('op', OPS)
def test_devices_of_every_op(op):
    tensors = OPS[op].inputs(dtype=torch.float32)
    assert OPS[op](*(x.to('meta') for x in tensors)).shape == OPS[op](*tensors).shape
    for index in range(len(tensors)):
        mixed = list(tensors)
        mixed[index] = mixed[index].detach().to('meta')
        refuses(' must be on (cpu|meta) with the others, got', OPS[op], *mixed)


# Values of the right type that do not fit are in tests/test_ops/test_dispatch.py.
MASKS = np.ones((B, T), bool), torch.ones(B, T, dtype=torch.bool, device='meta')
OPTIONS = [
    *[(dict(causal=causal), 'causal') for causal in ('no', 0, None, torch.zeros(2))],
    *[(dict(key_mask=mask), 'key_mask') for mask in MASKS],
    *[(dict(gate=gate), 'gate') for gate in (None, 5, ['sigmoid'])],
    (dict(key_function=5), 'key_function'),
]


@pytest.mark.parametrize('options, name', OPTIONS, ids=short)
def test_options_of_an_op(options, name):
    refuses_value(name, ops.aft_simple, **{**SIMPLE, **options})


FACTORS = dict(pos_u=torch.randn(T, 2), pos_v=torch.randn(T, 2))
KERNEL = dict(weight=torch.randn(4, 3), grid=(6,))
PLACES = [
    *[(ops.aft_local, dict(FACTORS, window=window), 'window') for window in ('2', None, [], True)],
    *[
        (ops.aft_local, dict(FACTORS, window=2, grid=grid), 'grid')
        for grid in ('6', ('6',), (6.0,), (), (0, 6), (1, 1, 6))
    ],
    *[(ops.aft_local_hard, dict(window=window), 'window') for window in (2.5, 'a', None)],
    *[(ops.aft_conv, dict(KERNEL, grid=grid), 'grid') for grid in (None, ('6',))],
    (ops.aft_conv, dict(KERNEL, weight=torch.randn(0, 3)), 'the 0 heads of weight'),
    (ops.aft_conv, dict(KERNEL, weight=torch.randn(())), 'the 0 heads of weight'),
    (ops.aft_conv, dict(KERNEL, global_connectivity='no'), 'global_connectivity'),
]


@pytest.mark.parametrize('op, options, name', PLACES, ids=short)
def test_windows_grids_and_kernels(op, options, name):
    refuses_value(name, op, **SIMPLE, **options)


STATES = [
    (
        ops.aft_simple_init_state,
        dict(batch_size=B, embed_dims=D),
        dict(batch_size=(-1, 1.5, None), embed_dims=(2.5, 0), dtype=(torch.int64, 'float32', None)),
    ),
    (ops.aft_full_init_state, dict(batch_size=B, embed_dims=D), dict(num_tokens=(-3, 2.5))),
    (
        ops.aft_conv_init_state,
        dict(batch_size=B, embed_dims=D, num_heads=2, kernel_size=(3,), grid=(6,)),
        dict(num_heads=(3, '2'), kernel_size=((3, 3),), grid=('6',)),
    ),
    (
        ops.aft_local_hard_init_state,
        dict(batch_size=B, embed_dims=D, window=2),
        dict(window=(0, 'a'), grid=(6,)),
    ),
]


@pytest.mark.parametrize('call, options, wrong', STATES, ids=short)
def test_states(call, options, wrong):
    for name, values in wrong.items():
        for value in values:
            refuses_value(name, call, **{**options, name: value})


def test_what_a_step_takes():
    state = ops.aft_simple_init_state(B, D)
    token = dict(query=X[:, 0], key=X[:, 0], value=X[:, 0])
    for wrong in (None, 'x', (), state.sums):
        refuses_value('state', ops.aft_simple_step, wrong, **token)
    refuses_value('key', ops.aft_simple_step, state, **{**token, 'key': None})
    refuses_value('value', ops.aft_simple_step, state, **{**token, 'value': X[:, 0].long()})
    _, later = ops.aft_simple_step(state, **token)
    refuses_value('state', ops.aft_simple_step, state, **token)
    ops.aft_simple_step(later, **token)


@pytest.mark.parametrize('grid', [(2, 2), (4,)])
def test_no_step_goes_past_the_grid(grid):
    options = dict(window=2, grid=grid)
    state = ops.aft_local_hard_init_state(B, D, **options)
    for t in range(4):
        _, state = ops.aft_local_hard_step(state, X[:, t], X[:, t], X[:, t], **options)
    with pytest.raises(ValueError, match='state must hold at most 4 tokens, got one more'):
        ops.aft_local_hard_step(state, X[:, 4], X[:, 4], X[:, 4], **options)


LENGTHS = [[2, 3], 3, None, *map(torch.tensor, ([2.0, 3.0], [2], [2, 7], [-1, 2], [True, False]))]


@pytest.mark.parametrize('lengths', LENGTHS, ids=short)
def test_lengths_of_a_prompt(lengths):
    state = ops.aft_simple_init_state(B, D)
    refuses_value('lengths', ops.prefill, state, X, X, lengths)
