"""The check of the Triton kernels on the user's device, ``aft_mm doctor --kernels``.

It compares them with the float64 oracle, also for inputs that are known to break kernels, and their
device time with eager's, and stores the results for dispatch.

Each op has a process of its own, because a kernel that accesses invalid memory breaks the CUDA
context. Only a wrong number, a device fault or a crash is a failure; a missing compiler, too little
memory or an interrupt leaves the op unchecked.
"""

import functools
import importlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from . import steps
from .cases import CASES, LONG_CASES, TIMED_CASES, Case
from .kernel_results import COMPILED, Result, save_results
from .state import prefill
from .triton import availability
from .triton.block_sizes import count_processors

# Largest error, relative to the largest entry of a tensor.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
}
GRADIENTS = ('grad_query', 'grad_key', 'grad_value', 'grad_bias', 'grad_bias_v')
# The least scale of an error; where one key takes all the weight, gradients are differences of
# terms of about 1.
LEAST_SCALE, LEAST_SCALE_OF_TERMS = 1e-3, 1.0
# Gradients that are zero with a spike: differences of sums over T targets, so that the rounding of
# their operands adds up to sqrt(T).
DIFFERENCES = ('grad_key', 'grad_bias', 'grad_bias_v')
# The largest product [B, T, S, D] of the oracle, 1 GiB, of which it stores several; larger cases
# are compared with eager.
LARGEST_PRODUCT = 2**27
DTYPES = {str(dtype).removeprefix('torch.'): dtype for dtype in availability.DTYPES}
TWISTS = (
    'masked',
    'raised',
    'lowered',
    'spike',
    'large bias',
    'crowd',
    'strided',
    'ungated',
)
GATES = {'ungated': 'none', 'strided': 'relu'}
BATCH, STEPS, RUNS = 3, 3, 3
# Sequences per multiprocessor of the twist 'crowd', more than run at the same time.
CROWD = 16
TIMED_BATCH = 16
# Seconds per op, most of which is compilation.
TIME_LIMIT = 1800


class WrongResultError(Exception):
    """A kernel computes a wrong result."""


@contextmanager
def using(backend: str | None) -> Iterator[None]:
    """Force a backend; None changes nothing."""
    before = os.environ.get('AFT_MM_BACKEND')
    if backend is not None:
        os.environ['AFT_MM_BACKEND'] = backend
    try:
        yield
    finally:
        if backend is None:
            pass
        elif before is None:
            del os.environ['AFT_MM_BACKEND']
        else:
            os.environ['AFT_MM_BACKEND'] = before


def check_cases(op: str, device: torch.device, dtype: torch.dtype) -> list[tuple[Case, str]]:
    """Return the (case, twist) pairs that an op must pass, in the interpreter only small ones."""
    family, is_step = op.removesuffix('_step'), op.endswith('_step')
    tensors = [torch.empty(1, 1, 1, device=device, dtype=dtype)] * 3
    tensors += [torch.empty(1, device=device)] * is_step  # the state is float32
    found: list[Case] = []
    for case in representatives(CASES) + LONG_CASES:
        free_bias = 'window' in case.options and len(case.parameters) == 1
        if is_step and (case.sources or (free_bias and not case.options['causal'])):
            continue  # has no causal form of the same shapes
        if is_step:
            case = replace(case, options={**case.options, 'causal': True})
        if case.op != family or (device.type != 'cuda' and case.tokens > 15):
            continue
        if not availability.unsupported_reasons(op, tensors, case.all_options):
            found.append(case)
    pairs = [(case, 'plain') for case in found]
    for twist in TWISTS:
        usable = [case for case in found if _applies(twist, case, is_step)]
        if twist == 'crowd':  # many sequences of a short case
            usable = [case for case in usable if case not in LONG_CASES]
        pairs += [(case, twist) for case in usable[-1:]]
    return pairs


def representatives(cases: Sequence[Case]) -> list[Case]:
    """Return the shortest case of each op, and of cases that differ only in sizes the longest.

    Others would take minutes to compile the same lines of a kernel.
    """
    shortest: dict[str, Case] = {}
    longest: dict[tuple, Case] = {}
    for case in sorted(cases, key=lambda case: case.tokens):
        shortest.setdefault(case.op, case)
        options = dict(case.options, window=None, grid=len(case.options.get('grid') or ()))
        form = case.op, *sorted(options.items(), key=str), len(case.parameters)
        longest[form] = case
    return [*shortest.values(), *(x for x in longest.values() if x not in shortest.values())]


def _applies(twist: str, case: Case, is_step: bool) -> bool:
    if twist == 'large bias':
        return bool(case.parameters)
    softmax = case.options.get('key_function', 'softmax') == 'softmax'
    return softmax and not (is_step and twist == 'masked')


def twisted_inputs(
    case: Case, twist: str, device: torch.device, dtype: torch.dtype
) -> list[Tensor | None]:
    """Return query, key, value and bias parameters: randn, changed by the twist."""
    generator = torch.Generator().manual_seed(0)
    shapes = case.shapes(BATCH)
    query, key, value, *biases = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    if twist in ('raised', 'lowered'):
        key += 1e4 if twist == 'raised' else -1e4
    elif twist == 'spike':
        key[:, -1] += 1000
    elif twist == 'large bias' and len(biases) == 1:
        biases = [59 * biases[0].sign()]
    elif twist == 'large bias':  # factors whose products are ±59
        columns = 59 * torch.ones_like(biases[0][:, :1]), biases[1][:, :1].sign()
        biases = [
            torch.cat((first, torch.zeros_like(x[:, 1:])), 1)
            for first, x in zip(columns, biases, strict=True)
        ]
    tensors: list[Tensor | None] = [x.to(device, dtype) for x in (query, key, value)]
    if twist == 'strided':  # the same numbers: tokens first, channels first, every other one
        spaced = tensors[2].repeat_interleave(2, 2)
        tensors = [
            tensors[0].transpose(0, 1).contiguous().transpose(0, 1),
            tensors[1].transpose(1, 2).contiguous().transpose(1, 2),
            spaced[..., ::2],
        ]
    if twist == 'ungated':
        tensors[0] = None
    bias_dtype = torch.float32 if case in LONG_CASES else dtype  # as under autocast
    return [*tensors, *(x.to(device, bias_dtype) for x in biases)]


def _gate(twist: str) -> dict[str, str]:
    return dict(gate=GATES[twist]) if twist in GATES else {}


def _repeat(tensors: Sequence[Tensor | None], copies: int) -> list[Any]:
    """Repeat the batch of query, key and value."""
    tokens = [x if x is None or copies == 1 else x.repeat(copies, 1, 1) for x in tensors[:3]]
    return [*tokens, *tensors[3:]]


def run_op(case: Case, tensors: Sequence[Tensor | None], copies: int, mask, **gate) -> list[Tensor]:
    """Return the output without and with gradients, and the gradient of every input."""
    leaves = [x if x is None else x.detach().requires_grad_() for x in _repeat(tensors, copies)]
    mask = mask if mask is None else mask.repeat(copies, 1)
    with torch.no_grad():
        plain = case(*leaves, key_mask=mask, **gate)
    output = case(*leaves, key_mask=mask, **gate)
    generator = torch.Generator().manual_seed(2)
    cotangent = torch.randn((BATCH, *output.shape[1:]), generator=generator, dtype=torch.float64)
    inputs = [x for x in leaves if x is not None]
    gradients = torch.autograd.grad(
        output, inputs, cotangent.to(output).repeat(copies, 1, 1), allow_unused=True
    )
    zeros = map(torch.zeros_like, inputs)
    return [plain, output.detach()] + [
        z if g is None else g for g, z in zip(gradients, zeros, strict=True)
    ]


def _expected_of_op(case: Case, tensors, copies: int, mask, **gate) -> list[Tensor]:
    wide = [x if x is None else x.double() for x in tensors]
    largest = BATCH * case.tokens * (case.sources or case.tokens) * case.channels
    with using('reference' if largest <= LARGEST_PRODUCT else 'eager'):
        found = run_op(case, wide, 1, mask, **gate)
    # Gradients of biases are sums over sequences.
    per_token = 2 + sum(x is not None for x in tensors[:3])
    repeated = [x.repeat(copies, 1, 1) for x in found[:per_token]]
    return repeated + [x * copies for x in found[per_token:]]


def new_state(case: Case, batch: int, device: torch.device):
    names = 'window', 'grid', 'key_function'
    sizes = {k: v for k, v in case.options.items() if k in names}
    if case.op == 'aft_full':
        sizes = dict(num_tokens=case.tokens)
    if case.op == 'aft_conv':
        sizes.update(num_heads=case.heads, kernel_size=case.parameters[0][1:])
    return getattr(steps, f'{case.op}_init_state')(batch, case.channels, **sizes, device=device)


def _step_of(case: Case, **gate) -> Callable:
    options = {k: v for k, v in {**case.options, **gate}.items() if k != 'causal'}
    return functools.partial(getattr(steps, f'{case.op}_step'), **options)


def _prompts(case: Case, device: torch.device) -> tuple[Tensor, int]:
    """Return the length of each prompt, and the number of steps after it."""
    count = min(STEPS, case.tokens)
    last = case.tokens - count
    return torch.tensor([last, last // 2, 0], device=device), count


def run_steps(case: Case, tensors: Sequence[Tensor | None], copies: int, **gate) -> list[Tensor]:
    """Return the rows of some steps after prompts of different lengths."""
    query, key, value, *biases = _repeat(tensors, copies)
    lengths, count = _prompts(case, value.device)
    lengths, state = lengths.repeat(copies), new_state(case, len(value), value.device)
    if lengths.any():
        key_function = case.options.get('key_function', 'softmax')
        state = prefill(state, key, value, lengths, key_function=key_function)
    each, step, rows = torch.arange(len(value), device=value.device), _step_of(case, **gate), []
    for n in range(count):
        token = [None if x is None else x[each, lengths + n] for x in (query, key, value)]
        row, state = step(state, *token, *biases)
        rows.append(row)
    return [torch.stack(rows, 1)]


def _expected_of_steps(case: Case, tensors, copies: int, **gate) -> list[Tensor]:
    with using('reference'):
        whole = case(*(x if x is None else x.double() for x in tensors), **gate)
    lengths, count = _prompts(case, whole.device)
    tokens = lengths[:, None] + torch.arange(count, device=whole.device)
    rows = whole.gather(1, tokens.unsqueeze(-1).expand(-1, -1, whole.shape[2]))
    return [rows.repeat(copies, 1, 1)]


def _copies(case: Case, twist: str, processors: int) -> int:
    return math.ceil(CROWD * processors / BATCH) if twist == 'crowd' else case.copies


def _key_mask(case: Case, twist: str, device: torch.device) -> Tensor | None:
    """Return a mask that hides some keys, and all of the second sequence."""
    if twist != 'masked':
        return None
    shape = BATCH, case.sources or case.tokens
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[1] = False
    return mask.to(device)


def run_kernels(
    op: str,
    case: Case,
    twist: str,
    device: torch.device,
    dtype: torch.dtype,
    processors: int,
) -> list[Tensor]:
    """Return the results of the kernels; hidden keys and values hold NaN and inf."""
    tensors, gate = twisted_inputs(case, twist, device, dtype), _gate(twist)
    copies, mask = _copies(case, twist, processors), _key_mask(case, twist, device)
    with using('triton'):
        if op.endswith('_step'):
            return run_steps(case, tensors, copies, **gate)
        if mask is not None:
            hidden, (query, key, value, *biases) = ~mask.unsqueeze(-1), tensors
            key, value = key.masked_fill(hidden, torch.nan), value.masked_fill(hidden, torch.inf)
            tensors = [query, key, value, *biases]
        return run_op(case, tensors, copies, mask, **gate)


def check_case(
    op: str, case: Case, twist: str, device: torch.device, dtype: torch.dtype, processors: int
) -> float:
    """Compare the kernels with the oracle three times and return the largest relative error.

    Raises:
        WrongResultError: If the error is too large or results differ between runs.
    """
    tensors, copies = twisted_inputs(case, twist, device, dtype), _copies(case, twist, processors)
    if op.endswith('_step'):
        expected = _expected_of_steps(case, tensors, copies, **_gate(twist))
    else:
        mask = _key_mask(case, twist, device)
        expected = _expected_of_op(case, tensors, copies, mask, **_gate(twist))
    runs = [run_kernels(op, case, twist, device, dtype, processors) for _ in range(RUNS)]
    terms = twist in ('raised', 'lowered', 'spike', 'large bias') or case.tokens == 1
    worst = 0.0
    names = (
        'output',
        'output with a gradient',
        *(name for name, x in zip(GRADIENTS, tensors, strict=False) if x is not None),
    )
    results = zip(expected, *runs, strict=True)
    for name, (want, got, *again) in zip(names, results, strict=False):
        least = LEAST_SCALE_OF_TERMS if terms else LEAST_SCALE
        if twist == 'spike' and name in DIFFERENCES:
            least *= math.sqrt(case.tokens)
        error = float((got.double() - want).abs().max() / want.abs().max().clamp_min(least))
        label = f'{name} of {op} ({twist}: {case.name}, {case.channels} channels)'
        if not error <= TOLERANCE[dtype]:
            raise WrongResultError(f'{label} has error {error:.1e}, allowed {TOLERANCE[dtype]:g}')
        if not all(torch.equal(got, other) for other in again):
            raise WrongResultError(f'{label} differs between runs')
        worst = max(worst, error)
    return worst


def device_seconds(call: Callable[[], object], repeats: int = 5, calls: int = 10) -> float:
    """Return the median device time of a call, with all launches queued beforehand."""
    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    cycles = int(3e9 * (time.perf_counter() - begin))  # longer than the launches take
    torch.cuda.synchronize()
    found = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e3 / calls)
    return statistics.median(found)


def _timed_calls(
    op: str, case: Case, device: torch.device, dtype: torch.dtype, compiled: bool
) -> dict:
    """Return the calls to time by mode."""
    scales = [1.0] * 3 + [0.1] * len(case.parameters)
    dtypes = [dtype] * 3 + [torch.float32] * len(case.parameters)
    tensors = [
        (torch.randn(shape, device=device) * scale).to(kind)
        for shape, scale, kind in zip(case.shapes(TIMED_BATCH), scales, dtypes, strict=True)
    ]
    if op.endswith('_step'):
        query, key, value, *biases = tensors
        last = torch.full((len(value),), case.tokens - 1, device=device)
        state = prefill(new_state(case, len(value), device), key, value, last)
        token = [x[:, -1] for x in (query, key, value)]
        return dict(step=torch.no_grad()(lambda: _step_of(case)(state, *token, *biases)))
    leaves = [x.requires_grad_() for x in tensors]
    function: Callable[..., Any] = functools.partial(case.function, **case.options)
    if compiled:
        function = torch.compile(function, fullgraph=True, dynamic=False)

    def train() -> None:
        torch.autograd.grad(function(*leaves).sum(), leaves)

    return dict(inference=torch.no_grad()(lambda: function(*leaves)), training=train)


def measure_speeds(op: str, device: torch.device, dtype: torch.dtype) -> dict[str, list[float]]:
    """Return device time of eager over that of the kernels, by mode, at the two sizes.

    Modes with COMPILED are left out if Inductor fails.
    """
    speeds: dict[str, list[float]] = {}
    is_step = op.endswith('_step')

    def measure(backend: str, case: Case, compiled: bool) -> dict[str, float]:
        with using(backend):
            calls = _timed_calls(op, case, device, dtype, compiled)
            return {mode: device_seconds(call) for mode, call in calls.items()}

    for case in TIMED_CASES[op.removesuffix('_step')]:
        if is_step:
            case = replace(case, options={**case.options, 'causal': True})
        kernels, others = measure('triton', case, False), measure('eager', case, False)
        if not is_step:
            try:
                compiled = measure('eager', case, True)
            except RuntimeError:
                compiled = {}
            others |= {mode + COMPILED: seconds for mode, seconds in compiled.items()}
        for mode, theirs in others.items():
            ours = kernels[mode.removesuffix(COMPILED)]
            speeds.setdefault(mode, []).append(theirs / ours)
    return speeds


def classify(error: BaseException) -> Result:
    """Return the result for an exception: failed only for wrong numbers and device faults."""
    text = ' '.join(f'{type(error).__name__}: {error}'.split())[:300]
    faults: tuple[str, ...] = (
        'illegal memory',
        'misaligned address',
        'illegal instruction',
        'device-side assert',
    )
    faults += 'unspecified launch failure', 'invalid program counter', 'hardware stack error'
    if isinstance(error, WrongResultError):
        return Result('failed', str(error))
    if any(fault in text.lower() for fault in faults):
        return Result('failed', text)
    return Result('unchecked', text)


def run_child(op: str, device_name: str, dtypes: Sequence[str]) -> None:
    """Check an op in this process; print a line of JSON per type."""
    device = torch.device(device_name)
    processors = count_processors(device)
    for name in dtypes:
        dtype = DTYPES[name]
        try:
            # A kernel must write all of its output: new memory holds NaN.
            torch.use_deterministic_algorithms(True, warn_only=True)
            pairs = check_cases(op, device, dtype)
            if device.type == 'cuda' and not op.endswith('_step'):  # which have few kernels
                compile_ahead = importlib.import_module('.triton.compile_ahead', __package__)
                with compile_ahead.compile_only():
                    for pair in pairs:
                        run_kernels(op, *pair, device, dtype, processors)
            errors = [check_case(op, *pair, device, dtype, processors) for pair in pairs]
            torch.use_deterministic_algorithms(False)
            speeds = measure_speeds(op, device, dtype) if device.type == 'cuda' else {}
            result = Result('passed', error=max(errors), speeds=speeds)
        except Exception as error:
            result = classify(error)
        print(json.dumps(asdict(result)), flush=True)
        if result.status == 'failed':
            return  # the parent starts another process


def check_op(op: str, device: str, dtypes: Sequence[str]) -> dict[str, Result]:
    """Check an op in processes of its own, one more after each failure; return results by type."""
    code = f'from {__name__} import run_child; import sys; '
    code += 'run_child(sys.argv[1], sys.argv[2], sys.argv[3:])'
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    environment = {**os.environ, 'PYTHONPATH': paths}
    results: dict[str, Result] = {}
    while remaining := [name for name in dtypes if name not in results]:
        command = [sys.executable, '-W', 'ignore', '-c', code, op, device, *remaining]
        try:
            ended = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT
            )
            lines, code_of_exit, errors = ended.stdout, ended.returncode, ended.stderr
        except subprocess.TimeoutExpired as error:
            # Bytes, even with text=True.
            lines, code_of_exit, errors = (error.stdout or b'').decode(), None, ''
        found = [Result(**json.loads(x)) for x in lines.splitlines() if x.startswith('{"')]
        results.update(zip(remaining, found, strict=False))
        if len(found) < len(remaining) and not (found and found[-1].status == 'failed'):
            results[remaining[len(found)]] = _exit_result(code_of_exit, errors)
    return results


def _exit_result(code: int | None, errors: str) -> Result:
    """Return the result for a process that ended early: only a crash is a failure."""
    if code is None:
        return Result('unchecked', f'not done after {TIME_LIMIT} s')
    if code < 0:
        crashes = signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL
        status = 'failed' if -code in crashes else 'unchecked'
        memory = ', perhaps for lack of memory' if -code == signal.SIGKILL else ''
        return Result(status, f'ended by signal {-code} ({signal.strsignal(-code)}){memory}')
    lines = errors.strip().splitlines()
    return Result('unchecked', lines[-1] if lines else f'exited with status {code}')


def check_kernels(
    ops: Sequence[str] | None = None, dtypes: Sequence[str] | None = None, device: str = 'cuda'
) -> bool:
    """Check kernels on a device, print a line for each and store the results.

    Args:
        ops: The ops and steps, all by default.
        dtypes: Names of types, all by default.
        device: 'cuda', 'cuda:1', ..., or 'cpu' in Triton's interpreter.

    Returns:
        Whether all passed.

    Raises:
        RuntimeError: If the kernels cannot run on the device.
    """
    place = torch.device(device)
    if place.type == 'cuda' and place.index is None and torch.cuda.is_available():
        place = torch.device('cuda', torch.cuda.current_device())
    missing = availability.machine_reasons(place.type, place.index)
    if not missing and place.type == 'cuda':
        missing = availability.missing_for_compilation()
    if missing:
        raise RuntimeError(f'the kernels cannot be checked on {device}: triton {missing[0]}')
    passed = True
    for op in ops or availability.KERNELS:
        results = check_op(op, str(place), list(dtypes or DTYPES))
        for name, result in results.items():
            print(f'{op} {name}: {result}', flush=True)
            passed = passed and result.status == 'passed'
        named = {f'{op} {name}': result for name, result in results.items()}
        path = save_results(place.type, place.index, named)
    print(f'results: {path}')
    return passed
