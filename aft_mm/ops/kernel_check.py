"""``aft_mm doctor --kernels``: which kernels are right on a device, and their times.

Outputs and gradients are compared with the float64 oracle, also for masked, very large and dominant
keys and for large biases.
"""

import importlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aft_mm.checks import check_choice

from . import steps
from .cases import CASES, LEAST_SCALE, LONG_CASES, PAIR_CASES, TIMED_CASES, TOLERANCE, Case
from .checks import ENVIRONMENT_VARIABLE
from .dispatch import KERNELS
from .state import StepState, prefill
from .verified import ALL as DTYPES

GRADIENTS = ('grad_query', 'grad_key', 'grad_value', 'grad_bias', 'grad_bias_v')
# Changes of the inputs of the last case of an op with softmax keys.
TWISTS = ('masked', 'raised', 'spike', 'large bias')
# The largest product [B, T, S, D] of the oracle; larger cases are compared with eager.
LARGEST_PRODUCT = 2**27
BATCH, TIMED_BATCH = 3, 16


@contextmanager
def using(backend: str) -> Iterator[None]:
    before = os.environ.get(ENVIRONMENT_VARIABLE)
    os.environ[ENVIRONMENT_VARIABLE] = backend
    try:
        yield
    finally:
        del os.environ[ENVIRONMENT_VARIABLE]
        if before is not None:
            os.environ[ENVIRONMENT_VARIABLE] = before


def supported_cases(
    op: str, device: torch.device, dtype: torch.dtype, backend: str = 'triton'
) -> list[Case]:
    is_step, cases = op.endswith('_step'), []
    tensors = [torch.empty(1, 1, 1, device=device, dtype=dtype)] * 3
    tensors += [torch.empty(1, device=device)] * is_step  # the state is float32
    for case in (*CASES, *PAIR_CASES, *LONG_CASES):
        if case.op != op.removesuffix('_step') or (device.type != 'cuda' and case.tokens > 15):
            continue
        if is_step and (
            case.sources or not (case.options.get('causal') or len(case.parameters) != 1)
        ):
            continue  # not causal, with a bias that a step has not
        if is_step:
            case = replace(case, options={**case.options, 'causal': True})
        if not KERNELS[backend].unsupported_reasons(op, tensors, case.all_options):
            cases.append(case)
    return cases


def inputs(case: Case, twist: str, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    tensors = [x.detach() for x in case.inputs(BATCH)]
    if twist == 'raised':
        tensors[1] += 1e4
    elif twist == 'spike':
        tensors[1][:, -1] += 1000
    elif twist == 'large bias' and len(tensors) == 4:
        tensors[3] = 59 * tensors[3].sign()
    elif twist == 'large bias':
        for factor in tensors[3:]:  # whose products are ±59
            factor[:, 0], factor[:, 1:] = math.sqrt(59) * factor[:, 0].sign(), 0
    bias_dtype = torch.float32 if case in LONG_CASES else dtype
    return [x.to(device, bias_dtype if i > 2 else dtype) for i, x in enumerate(tensors)]


def run_op(case: Case, tensors: Sequence[Tensor], mask: Tensor | None) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    output = case(*leaves, key_mask=mask)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    gradients = torch.autograd.grad(output, leaves, cotangent.to(output), materialize_grads=True)
    return [output.detach(), case(*tensors, key_mask=mask), *gradients]


def new_state(case: Case, batch: int, device: torch.device) -> StepState:
    names = 'window', 'grid', 'key_function'
    sizes = {name: x for name, x in case.options.items() if name in names}
    if case.op == 'aft_full':
        sizes = dict(num_tokens=case.tokens)
    if case.op == 'aft_conv':
        sizes.update(num_heads=case.heads, kernel_size=case.parameters[0][1:])
    make: Callable[..., StepState] = getattr(steps, f'{case.op}_init_state')
    return make(batch, case.channels, **sizes, device=device)


def step_of(case: Case) -> Callable[..., tuple[Tensor, StepState]]:
    options = {name: value for name, value in case.options.items() if name != 'causal'}
    return partial(getattr(steps, f'{case.op}_step'), **options)


def run_steps(case: Case, tensors: Sequence[Tensor]) -> list[Tensor]:
    (query, key, value, *biases), step, rows = tensors, step_of(case), []
    state = new_state(case, BATCH, value.device)
    for t in range(case.tokens):
        row, state = step(state, query[:, t], key[:, t], value[:, t], *biases)
        rows.append(row)
    return [torch.stack(rows, 1)]


def check_case(
    op: str,
    case: Case,
    twist: str,
    device: torch.device,
    dtype: torch.dtype,
    backend: str = 'triton',
) -> tuple[float, str]:
    tensors, mask, is_step = inputs(case, twist, device, dtype), None, op.endswith('_step')
    if twist == 'masked':  # some keys, and all of the second sequence
        mask = torch.rand(tensors[1].shape[:2], device=device) < 0.6
        mask[1] = False
    product = BATCH * case.tokens * (case.sources or case.tokens) * case.channels
    with using('reference' if product <= LARGEST_PRODUCT else 'eager'):
        wide = [x.double() for x in tensors]
        expected = [case(*wide)] if is_step else run_op(case, wide, mask)
    if mask is not None:  # hidden keys and values are not read
        tensors[1].masked_fill_(~mask.unsqueeze(-1), torch.nan)
        tensors[2].masked_fill_(~mask.unsqueeze(-1), torch.inf)
    run = partial(run_steps, case, tensors) if is_step else partial(run_op, case, tensors, mask)
    torch.use_deterministic_algorithms(True, warn_only=True)  # new memory holds NaN
    try:
        with using(backend):
            runs = [run() for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    # If one key has all the weight, gradients are differences of terms of about 1, or of T of them.
    scale = 1.0 if twist not in ('', 'masked') or case.tokens == 1 else LEAST_SCALE
    spread = math.sqrt(case.tokens) if twist == 'spike' else 1.0
    worst = 0.0, ''
    for name, want, got, again in zip(
        ('output', 'output', *GRADIENTS), expected, *runs, strict=False
    ):
        least = scale * (spread if name in ('grad_key', 'grad_bias', 'grad_bias_v') else 1.0)
        error = float((got.double() - want).abs().max() / want.abs().max().clamp_min(least))
        if not torch.equal(got, again):  # or NaN
            error = math.inf
        worst = max(worst, (error, f'{name}, {case.name}, {case.channels} channels {twist}'))
    return worst


def both_ways(call: Callable[..., Tensor], tensors: Sequence[Tensor]) -> list[Callable[[], Any]]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    cotangent = call(*leaves).detach()
    forward = torch.no_grad()(lambda: call(*leaves))
    return [forward, lambda: torch.autograd.grad(call(*leaves), leaves, cotangent)]


def timed_calls(
    op: str, device: torch.device, dtype: torch.dtype, backend: str
) -> dict[str, list[Callable[[], Any]]]:
    case = TIMED_CASES[op.removesuffix('_step')][-1]
    tensors = [torch.randn(shape, device=device) for shape in case.shapes(TIMED_BATCH)]
    query, key, value, *biases = [x.to(dtype) for x in tensors[:3]] + [0.1 * x for x in tensors[3:]]
    if op.endswith('_step'):
        case = replace(case, options={**case.options, 'causal': True})
        last = torch.full((TIMED_BATCH,), case.tokens - 1, device=device)
        state, step = prefill(new_state(case, TIMED_BATCH, device), key, value, last), step_of(case)
        token = [x[:, -1] for x in (query, key, value)]

        def call() -> Any:  # a step overwrites the position
            return step(state._replace(position=last.clone()), *token, *biases)

        calls = [torch.no_grad()(call)]
        return {backend: calls, 'eager': calls}
    calls = both_ways(case, [query, key, value, *biases])
    heads = [x.unflatten(-1, (-1, 64)).transpose(1, 2) for x in (query, key, value)]
    causal = case.options.get('causal', False)
    flash = both_ways(partial(F.scaled_dot_product_attention, is_causal=causal), heads)
    return {backend: calls, 'eager': calls, 'flash attention': flash}


def describe_times(
    op: str, device: torch.device, dtype: torch.dtype, backend: str = 'triton'
) -> str:
    bench = partial(importlib.import_module('triton.testing').do_bench, return_mode='median')
    with using(backend):
        calls = timed_calls(op, device, dtype, backend)
        ours = [bench(call) for call in calls.pop(backend)]
    text = ', '.join(f'{1000 * ms:.0f}' for ms in ours) + ' µs'
    with using('eager'):
        for name, rivals in calls.items():
            speeds = [bench(call) / ms for call, ms in zip(rivals, ours, strict=True)]
            text += f'; {", ".join(f"{x:.2f}" for x in speeds)} x {name}'
    return text


def check_op(op: str, device: torch.device, dtype: torch.dtype, backend: str = 'triton') -> str:
    """Return 'right' with the largest error and, on a GPU, times; or what is wrong."""
    pairs = [(case, '') for case in supported_cases(op, device, dtype, backend)]
    last = [case for case, _ in pairs if 'key_function' not in case.options][-1]
    left_out = {'masked': op.endswith('_step'), 'large bias': not last.parameters}
    pairs += [(last, twist) for twist in TWISTS if not left_out.get(twist)]
    error, where = max(check_case(op, *pair, device, dtype, backend) for pair in pairs)
    if error > TOLERANCE[dtype]:
        return f'wrong by {error:.1e} > {TOLERANCE[dtype]:g}: {where}'
    times = '; ' + describe_times(op, device, dtype, backend) if device.type == 'cuda' else ''
    return f'right, largest error {error:.1e}{times}'


def check_kernels(ops: Sequence[str] = (), device: str = 'cuda') -> bool:
    """Print a line per backend, op, all if none is named, and dtype; return whether all are right.

    Raises:
        ValueError: If an op has no kernel.
        RuntimeError: If the kernels of no backend can run on the device.
    """
    target, all_right, missing = torch.device(device), True, {}
    known = [*KERNELS['triton'].KERNELS]  # those of cuda, too
    for op in ops:
        check_choice('op', op, known)
    for backend, module in KERNELS.items():
        if reasons := module.machine_reasons(target.type, target.index):
            missing[backend] = reasons[0]
    if len(missing) == len(KERNELS):
        reasons = [f'{backend} {reason}' for backend, reason in missing.items()]
        raise RuntimeError(f'the kernels cannot be checked on {device}: {"; ".join(reasons)}')
    for backend, reason in missing.items():
        print(f'{backend}: not checked, {reason}')
    for op, dtype in itertools.product(ops or known, reversed(DTYPES)):  # dtypes of models first
        for backend, module in KERNELS.items():
            if backend in missing or op not in module.KERNELS or dtype not in module.DTYPES:
                continue
            try:
                result = check_op(op, target, dtype, backend)
            except Exception as error:  # a fault of a kernel, too little memory, no compiler
                result = f'failed: {type(error).__name__}: {error}'
            all_right &= result.startswith('right')
            print(f'{backend} {op} {str(dtype).removeprefix("torch.")}: {result}', flush=True)
    return all_right
