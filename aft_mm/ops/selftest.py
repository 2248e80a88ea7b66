"""Cases of the ops, and the check of the Triton kernels on the user's device.

``aft_mm doctor --kernels`` or ``python -m aft_mm.ops --verify`` compares the kernels with the
float64 oracle on :data:`CASES` and :data:`LONG_CASES`, with inputs that are known to break kernels,
and compares their device time with eager's. The results are stored in the cache folder for this
device, these versions and these sources. Dispatch only reads them: without a result, eager is used.

Each op is checked in a process of its own, because a kernel that accesses invalid memory breaks the
CUDA context. Only a wrong number, a device fault or a crash is a failure. A missing compiler, too
little memory or an interrupt leaves the op unchecked.
"""

import functools
import inspect
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
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from . import functional, steps
from .kernel_results import Result, save_results
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
# The biases are w, or u and v.
GRADIENTS = ('grad_query', 'grad_key', 'grad_value', 'grad_bias', 'grad_bias_v')
# The least scale of an error. Where one key takes all the weight, gradients are differences of
# terms of about 1.
LEAST_SCALE, LEAST_SCALE_OF_TERMS = 1e-3, 1.0
DTYPES = {str(dtype).removeprefix('torch.'): dtype for dtype in availability.DTYPES}
CHANNELS = 6


@dataclass(frozen=True)
class Case:
    """An op with its options, T, S and the shapes of its bias parameters.

    weights_sum_to_one: whether the output is a gated mean of the values.
    """

    name: str
    op: str
    tokens: int
    options: dict[str, Any] = field(default_factory=dict)
    sources: int | None = None
    heads: int = CHANNELS
    parameters: tuple[tuple[int, ...], ...] = ()
    weights_sum_to_one: bool = True
    channels: int = CHANNELS

    @property
    def function(self) -> Callable[..., Tensor]:
        """The public op."""
        return getattr(functional, self.op)

    @property
    def all_options(self) -> dict[str, Any]:
        """Every keyword of the op, defaults included."""
        keywords = inspect.signature(self.function).parameters.values()
        defaults = {p.name: p.default for p in keywords if p.kind == p.KEYWORD_ONLY}
        return {**defaults, **self.options}

    def shapes(self, batch: int) -> list[tuple[int, ...]]:
        """Shapes of query, key, value and the bias parameters."""
        sources = self.sources or self.tokens
        tokens = (self.tokens, self.channels), (sources, self.heads), (sources, self.channels)
        return [*((batch, *size) for size in tokens), *self.parameters]

    def inputs(self, batch: int = 2, dtype=torch.float64, bias_scale: float = 1.0) -> list[Tensor]:
        """query, key, value and the bias parameters, all randn."""
        tensors = [torch.randn(shape, dtype=torch.float64) for shape in self.shapes(batch)]
        tensors[3:] = [x * bias_scale for x in tensors[3:]]
        return [x.to(dtype).requires_grad_() for x in tensors]

    def __call__(self, *tensors: Tensor | None, **extra) -> Tensor:
        return self.function(*tensors, **{**self.options, **extra})


def simple(tokens: int, sources: int | None = None, channels: int = CHANNELS, **options) -> Case:
    """A case of AFT-simple."""
    label = '-'.join(f'{k}={v}' for k, v in options.items())
    if options.get('key_function') == 'relu2':
        options['gate'] = 'relu'
    one = 'key_function' not in options
    name = f'simple-{tokens}-{label}'
    return Case(name, 'aft_simple', tokens, options, sources, channels, (), one, channels)


def full(
    tokens: int, sources: int | None = None, causal: bool = False, channels: int = CHANNELS
) -> Case:
    """A case of AFT-full."""
    shape = tokens, sources or tokens
    name = 'full-{}x{}-causal={}'.format(*shape, causal)
    options = dict(causal=causal)
    return Case(name, 'aft_full', tokens, options, sources, channels, (shape,), True, channels)


def local(
    tokens: int,
    window: int | tuple[int, int],
    grid: tuple[int, int] | None = None,
    causal: bool = False,
    rank: int = 3,
    op: str = 'aft_local',
    channels: int = CHANNELS,
) -> Case:
    """A case of AFT-local or AFT-local-learned with factors, or with a free bias if `rank` is 0."""
    parameters: tuple[tuple[int, ...], ...] = ((tokens, rank),) * 2
    if not rank:
        assert isinstance(window, int)
        parameters = ((tokens, window if causal else 2 * window - 1),)
    name = f'{op[4:]}-{"" if rank else "free-"}{grid or tokens}-s={window}-causal={causal}'
    options = dict(window=window, grid=grid, causal=causal)
    one = op == 'aft_local'
    return Case(name, op, tokens, options, None, channels, parameters, one, channels)


learned = functools.partial(local, op='aft_local_learned')


def conv(
    grid: Sequence[int],
    kernel: Sequence[int],
    heads: int = 2,
    causal: bool = False,
    channels: int = CHANNELS,
    **options,
) -> Case:
    """A case of AFT-conv."""
    name = f'conv-{grid}-k={kernel}-h={heads}-causal={causal}{"-degenerate" if options else ""}'
    options = dict(grid=tuple(grid), causal=causal, **options)
    tokens, weight = math.prod(grid), ((heads, *kernel),)
    return Case(name, 'aft_conv', tokens, options, None, heads, weight, True, channels)


def hard(
    tokens: int,
    window: int | tuple[int, int],
    grid: tuple[int, int] | None = None,
    causal: bool = True,
    channels: int = CHANNELS,
) -> Case:
    """A case of AFT-local-hard."""
    name = f'window-{grid or tokens}-s={window}-causal={causal}'
    options = dict(window=window, grid=grid, causal=causal)
    return Case(name, 'aft_local_hard', tokens, options, None, channels, (), True, channels)


# Small cases of all ops and options: the tests and the check run over them.
CASES = [
    simple(7),
    simple(5, 9),
    simple(131, causal=True),
    simple(1, causal=True),
    simple(7, key_function='relu'),
    simple(7, key_function='relu', causal=True),
    simple(7, key_function='relu2'),
    simple(5, 9, key_function='relu2'),
    simple(7, key_function='relu2', causal=True),
    full(1),
    full(7, 4),
    full(63),
    full(7, causal=True),
    full(63, causal=True),
    local(7, 3),
    local(63, 0),
    local(63, 1, causal=True),
    local(130, 5),
    local(130, 40, causal=True),
    local(131, 33),
    local(110, (2, 3), (11, 10)),
    local(110, (3, 4), (10, 11), causal=True),
    local(111, 2, (37, 3), causal=True),
    local(12, (9, 9), (3, 4)),
    local(7, 1, rank=0),
    local(7, 20, causal=True, rank=0),
    local(63, 5, rank=0),
    local(63, 33, causal=True, rank=0),
    local(131, 5, rank=0),
    local(131, 40, causal=True, rank=0),
    conv((7,), (3,)),
    conv((9,), (5,), causal=True),
    conv((1, 9), (1, 5), heads=6),
    conv((5, 4), (3, 3), heads=1),
    conv((5, 7), (3, 5), heads=6),
    conv((4, 5), (9, 13), heads=3),
    conv((3, 14), (3, 13), heads=3),
    conv((5, 4), (3, 5), causal=True),
    conv((3, 4, 2), (3, 1, 3)),
    conv((3, 2, 4), (3, 3, 5), causal=True),
    conv((5, 4), (3, 3), global_connectivity=False),
    conv((5, 4), (3, 3), causal=True, global_connectivity=False),
    hard(1, 1),
    hard(63, 5),
    hard(63, 100),
    hard(30, 4, causal=False),
    hard(35, (4, 2), (5, 7)),
    hard(35, (2, 6), (7, 5)),
    hard(12, (4, 12), (3, 4)),
    hard(35, 4, (5, 7), causal=False),
    learned(7, 3),
    learned(63, 0),
    learned(7, 0, causal=True),
    learned(130, 4),
    learned(130, 40, causal=True),
    learned(63, 4, causal=True, rank=0),
    learned(130, 40, rank=0),
    learned(110, (2, 3), (11, 10), causal=True),
    learned(12, (9, 9), (3, 4)),
]
# Two per op that take the branches of default configs: tiles outside the window, a sequence in
# chunks, more than one step over the rank, aligned and odd channels.
LONG_CASES = [
    simple(3000, causal=True, channels=64),
    simple(601, causal=True, channels=65),
    full(300, causal=True, channels=64),
    full(257, 401, channels=65),
    local(600, 32, causal=True, rank=64, channels=64),
    local(600, (3, 4), (24, 25), rank=40, channels=65),
    learned(600, 32, causal=True, rank=64, channels=64),
    learned(600, (3, 4), (24, 25), rank=40, channels=65),
    conv((28, 28), (11, 11), heads=64, channels=64),
    conv((600,), (31,), heads=5, channels=65),
    hard(1000, 100, channels=64),
    hard(600, (8, 6), (30, 20), channels=65),
]
# Cases that are timed, near the sizes of configs: (small, large).
TIMED_CASES = {
    'aft_simple': [simple(n, causal=True, channels=d) for n, d in ((512, 256), (3072, 512))],
    'aft_full': [full(n, channels=384) for n in (196, 1024)],
    'aft_local': [local(n, 32, causal=True, rank=64, channels=512) for n in (512, 3072)],
    'aft_local_learned': [learned(n, 32, causal=True, rank=64, channels=512) for n in (512, 3072)],
    'aft_conv': [conv((n, n), (11, 11), heads=384, channels=384) for n in (14, 32)],
    'aft_local_hard': [hard(n, 32, channels=512) for n in (512, 3072)],
}
TWISTS = (
    'masked',
    'raised',
    'lowered',
    'spike',
    'large bias',
    'crowd',
    'strided',
    'float32 bias',
    'ungated',
    'relu gate',
)
BATCH, STEPS, RUNS = 3, 3, 3
# Sequences per multiprocessor of the twist 'crowd', more than run at the same time.
CROWD = 16
TIMED_BATCH = 16
# Seconds for the check of one op in all types, most of which is compilation.
TIME_LIMIT = 3600


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
    """Return the (case, twist) pairs that the kernel of an op or step must pass.

    Triton's interpreter is slow and runs small cases only.
    """
    family, is_step = op.removesuffix('_step'), op.endswith('_step')
    tensors = [torch.empty(1, 1, 1, device=device, dtype=dtype)] * 3
    tensors += [torch.empty(1, device=device)] * is_step  # the state is float32
    found: list[Case] = []
    for case in CASES + LONG_CASES:
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
        usable = [case for case in found if _applies(twist, case, is_step, dtype)]
        if twist == 'crowd':  # many sequences of a short case
            usable = [case for case in usable if case.tokens < 132]
        pairs += [(case, twist) for case in usable[-2 if twist == 'float32 bias' else -1 :]]
    return pairs


def _applies(twist: str, case: Case, is_step: bool, dtype: torch.dtype) -> bool:
    if twist == 'large bias':
        return bool(case.parameters)
    if twist == 'float32 bias':
        return bool(case.parameters) and dtype != torch.float32
    softmax = case.options.get('key_function', 'softmax') == 'softmax'
    return softmax and not (is_step and twist == 'masked')


def twisted_inputs(
    case: Case, twist: str, device: torch.device, dtype: torch.dtype
) -> list[Tensor | None]:
    """Return query, key, value and bias parameters on the device, randn changed by the twist."""
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
    bias_dtype = torch.float32 if twist == 'float32 bias' else dtype
    return [*tensors, *(x.to(device, bias_dtype) for x in biases)]


def _gate(case: Case, twist: str) -> dict[str, str]:
    gate = {'ungated': 'none', 'relu gate': 'relu'}.get(twist)
    return dict(gate=gate) if gate else {}


def _repeat(tensors: Sequence[Tensor | None], copies: int) -> list[Any]:
    """Repeat the batch of query, key and value; biases stay."""
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
    with using('reference'):
        found = run_op(case, wide, 1, mask, **gate)
    # Gradients of biases are sums over sequences.
    per_token = 2 + sum(x is not None for x in tensors[:3])
    repeated = [x.repeat(copies, 1, 1) for x in found[:per_token]]
    return repeated + [x * copies for x in found[per_token:]]


def new_state(case: Case, batch: int, device: torch.device):
    """Return the state of the op's step before its first token."""
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
    """Return the tokens before the steps, for each sequence, and the number of steps."""
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


def check_case(
    op: str, case: Case, twist: str, device: torch.device, dtype: torch.dtype, processors: int
) -> float:
    """Compare the kernels with the oracle, three times; return the largest relative error.

    Raises:
        WrongResultError: if an error is too large, or results differ between runs.
    """
    tensors, gate, mask = twisted_inputs(case, twist, device, dtype), _gate(case, twist), None
    copies = math.ceil(CROWD * processors / BATCH) if twist == 'crowd' else 1
    if op.endswith('_step'):
        expected = _expected_of_steps(case, tensors, copies, **gate)
        with using('triton'):
            runs = [run_steps(case, tensors, copies, **gate) for _ in range(RUNS)]
    else:
        inputs = tensors
        if twist == 'masked':
            # Hidden keys and values hold NaN and inf; the second sequence sees nothing.
            shape = BATCH, case.sources or case.tokens
            mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.6
            mask[1] = False
            mask = mask.to(device)
            hidden, (query, key, value, *biases) = ~mask.unsqueeze(-1), tensors
            key, value = key.masked_fill(hidden, torch.nan), value.masked_fill(hidden, torch.inf)
            inputs = [query, key, value, *biases]
        expected = _expected_of_op(case, tensors, copies, mask, **gate)
        with using('triton'):
            runs = [run_op(case, inputs, copies, mask, **gate) for _ in range(RUNS)]
    terms = twist in ('raised', 'lowered', 'spike', 'large bias') or case.tokens == 1
    least, worst = LEAST_SCALE_OF_TERMS if terms else LEAST_SCALE, 0.0
    names = (
        'output',
        'output with a gradient',
        *(name for name, x in zip(GRADIENTS, tensors, strict=False) if x is not None),
    )
    results = zip(expected, *runs, strict=True)
    for name, (want, got, *again) in zip(names, results, strict=False):
        error = float((got.double() - want).abs().max() / want.abs().max().clamp_min(least))
        label = f'{name} of {op} ({twist}: {case.name}, {case.channels} channels)'
        if not error <= TOLERANCE[dtype]:
            raise WrongResultError(f'{label} has error {error:.1e}, allowed {TOLERANCE[dtype]:g}')
        if not all(torch.equal(got, other) for other in again):
            raise WrongResultError(f'{label} differs between runs')
        worst = max(worst, error)
    return worst


def device_seconds(call: Callable[[], object], repeats: int = 5, calls: int = 10) -> float:
    """Return the device time of a call by CUDA events, with all launches queued beforehand."""
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


def _timed_calls(op: str, case: Case, device: torch.device, dtype: torch.dtype) -> dict:
    """Return the calls to time by mode; biases are float32, as under autocast."""
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

    def train() -> None:
        torch.autograd.grad(case(*leaves).sum(), leaves)

    return dict(inference=torch.no_grad()(lambda: case(*leaves)), training=train)


def measure_speeds(op: str, device: torch.device, dtype: torch.dtype) -> dict[str, list[float]]:
    """Return device time of eager over that of the kernels, by mode, at the two sizes."""
    speeds: dict[str, list[float]] = {}
    for case in TIMED_CASES[op.removesuffix('_step')]:
        if op.endswith('_step'):
            case = replace(case, options={**case.options, 'causal': True})
        seconds = {}
        for backend in ('eager', 'triton'):
            with using(backend):
                calls = _timed_calls(op, case, device, dtype)
                seconds[backend] = {mode: device_seconds(call) for mode, call in calls.items()}
        for mode, theirs in seconds['eager'].items():
            speeds.setdefault(mode, []).append(theirs / seconds['triton'][mode])
    return speeds


def classify(error: BaseException) -> Result:
    """Return the result for an exception: failed for wrong numbers and device faults only."""
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
    """Check an op in processes of its own, one more after each failure; results by type."""
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
        except subprocess.TimeoutExpired:
            lines, code_of_exit, errors = '', None, ''
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
        return Result(status, f'ended by signal {-code} ({signal.strsignal(-code)})')
    lines = errors.strip().splitlines()
    return Result('unchecked', lines[-1] if lines else f'exited with status {code}')


def check_kernels(
    ops: Sequence[str] | None = None, dtypes: Sequence[str] | None = None, device: str = 'cuda'
) -> bool:
    """Check kernels on a device, print a line for each and store the results.

    Args:
        ops: the ops and steps, all by default.
        dtypes: names of types, all by default.
        device: 'cuda', 'cuda:1', ..., or 'cpu' in Triton's interpreter.

    Returns:
        Whether all passed.

    Raises:
        RuntimeError: if the kernels cannot run on the device.
    """
    place = torch.device(device)
    if place.type == 'cuda' and place.index is None and torch.cuda.is_available():
        place = torch.device('cuda', torch.cuda.current_device())
    missing = availability.machine_reasons(place.type, place.index)
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
