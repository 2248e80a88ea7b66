"""The process that checks the kernels of one op and dtype on one device, and may die of it.

``python -m aft_mm.ops.verify.judge OP DEVICE DTYPE SECONDS`` writes a line of JSON before each case
and one with what was found; `process.py` starts it, and knows what happened if they end early.
"""

import json
import signal
import sys
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from .. import eager, reference, steps
from ..state import StepState, prefill
from ..triton import library
from ..triton.blocks import count_processors
from .cases import BATCH, TIMED, Case, cases

# Of errors against the largest entry of a tensor; as the tests of the kernels have them.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
RUNS = 3
STEPS = 3
# Sequences of which an op and a step are timed, and the seconds for each.
TIMED_SEQUENCES, TIMED_STEP_SEQUENCES = 15, 63
TIMING = 0.2


class WrongResultError(Exception):
    """A kernel does not compute what it should; the message says what."""


def say(**what) -> None:
    """A line for the process that waits."""
    print(json.dumps(what), flush=True)


def repeated(tensors: list[Tensor | None], copies: int) -> list[Tensor | None]:
    """query, key and value with the batch so many times; biases as they are."""
    tokens = [x if x is None or copies == 1 else x.repeat(copies, 1, 1) for x in tensors[:3]]
    return [*tokens, *tensors[3:]]


def run_op(
    function: Callable[..., Tensor],
    case: Case,
    tensors: list[Tensor | None],
    copies: int,
    mask: Tensor | None,
) -> list[Tensor]:
    """The output without and with gradients, and the gradient of every input."""
    leaves = [x if x is None else x.detach().requires_grad_() for x in repeated(tensors, copies)]
    mask = mask if mask is None else mask.repeat(copies, 1)
    with torch.no_grad():
        plain = function(*leaves, **case.options, key_mask=mask)
    output = function(*leaves, **case.options, key_mask=mask)
    generator = torch.Generator().manual_seed(2)
    cotangent = torch.randn((BATCH, *output.shape[1:]), generator=generator, dtype=torch.float64)
    inputs = [x for x in leaves if x is not None]
    gradients = torch.autograd.grad(
        output, inputs, cotangent.to(output).repeat(copies, 1, 1), allow_unused=True
    )
    zeros = map(torch.zeros_like, inputs)
    filled = [z if g is None else g for g, z in zip(gradients, zeros, strict=True)]
    return [plain, output.detach(), *filled]


def wide(tensors: list[Tensor | None]) -> list[Tensor | None]:
    """The inputs in float64."""
    return [x if x is None else x.double() for x in tensors]


def expected_of_op(case: Case, tensors: list[Tensor | None], mask: Tensor | None) -> list[Tensor]:
    """What the oracle says, for a batch that is repeated as the case has it."""
    name, copies = case.form.op, case.copies
    found = run_op(getattr(reference, name), case, wide(tensors), 1, mask)
    # Sequences do not meet but in the gradients of the biases, which are sums over them.
    kept = 2 + sum(x is not None for x in tensors[:3])
    return [x.repeat(copies, 1, 1) for x in found[:kept]] + [x * copies for x in found[kept:]]


def new_state(case: Case, batch: int, device: torch.device) -> StepState:
    """The state of a step before its first token."""
    form = case.form
    sizes = {k: v for k, v in form.options.items() if k in ('window', 'grid', 'key_function')}
    if form.op == 'aft_full':
        sizes = dict(num_tokens=form.tokens)
    if form.op == 'aft_conv':
        sizes.update(num_heads=form.heads, kernel_size=form.parameters[0][1:])
    init = getattr(steps, f'{form.op}_init_state')
    return init(batch, form.channels, **sizes, device=device)


def run_steps(
    backend: ModuleType, case: Case, tensors: list[Tensor | None], copies: int
) -> list[Tensor]:
    """Rows of some steps, after a prompt up to the last of them, half of that, and none."""
    query, key, value, *biases = repeated(tensors, copies)
    form, step = case.form, getattr(backend, f'{case.form.op}_step')
    state = new_state(case, len(value), value.device)
    lengths = prompt_lengths(case, value.device).repeat(copies)
    if lengths.any():
        key_function = form.options.get('key_function', 'softmax')
        state = prefill(state, key, value, lengths, key_function=key_function)
    options = {k: v for k, v in case.options.items() if k != 'causal'}
    each, rows = torch.arange(len(value), device=value.device), []
    for n in range(min(STEPS, form.tokens)):
        token = [None if x is None else x[each, lengths + n] for x in (query, key, value)]
        if case.twist == 'strided':
            token = [torch.stack((x, x), -1)[..., 0] for x in token]
        row, state = step(state, *token, *biases, **options)
        rows.append(row)
    return [torch.stack(rows, 1)]


def prompt_lengths(case: Case, device: torch.device) -> Tensor:
    """How many tokens precede the steps; the last token of the bias is among them."""
    last = case.form.tokens - min(STEPS, case.form.tokens)
    return torch.tensor([last, last // 2, 0], device=device)


def expected_of_steps(case: Case, tensors: list[Tensor | None]) -> list[Tensor]:
    """The rows of the causal op, by the oracle."""
    whole = getattr(reference, case.form.op)(*wide(tensors), **case.options, key_mask=None)
    lengths = prompt_lengths(case, whole.device)
    tokens = lengths[:, None] + torch.arange(min(STEPS, case.form.tokens), device=whole.device)
    rows = whole.gather(1, tokens.unsqueeze(-1).expand(-1, -1, whole.shape[2]))
    return [rows.repeat(case.copies, 1, 1)]


def poisoned(tensors: list[Tensor | None], mask: Tensor | None) -> list[Tensor | None]:
    """The inputs with NaN for hidden keys and inf for hidden values."""
    if mask is None:
        return tensors
    hidden, (query, key, value, *biases) = ~mask.unsqueeze(-1), tensors
    key, value = key.masked_fill(hidden, torch.nan), value.masked_fill(hidden, torch.inf)
    return [query, key, value, *biases]


def names(case: Case, is_step: bool) -> list[str]:
    """What the tensors of a run are called."""
    if is_step:
        return ['the rows']
    inputs = [*(['query'] if case.twist != 'ungated' else []), 'key', 'value']
    inputs += [f'bias {n}' for n in range(len(case.form.parameters))]
    outputs = ['the output without gradients', 'the output']
    return outputs + [f'the gradient of {name}' for name in inputs]


def judge(op: str, case: Case, device: torch.device, dtype: torch.dtype) -> float:
    """The largest error of a case; raises :class:`WrongResultError` for one too large."""
    is_step, tensors, mask = op.endswith('_step'), case.inputs(device, dtype), case.mask(device)
    if is_step:
        expected = expected_of_steps(case, tensors)
        runs = [run_steps(library, case, tensors, case.copies) for _ in range(RUNS)]
    else:
        expected, inputs = expected_of_op(case, tensors, mask), poisoned(tensors, mask)
        function = getattr(library, op)
        runs = [run_op(function, case, inputs, case.copies, mask) for _ in range(RUNS)]
    worst, allowed = 0.0, TOLERANCE[dtype]
    for name, want, got, *again in zip(names(case, is_step), expected, *runs, strict=True):
        scale = want.abs().max().clamp_min(case.floor)
        error = float((got.double() - want).abs().max() / scale)
        if not error <= allowed:
            raise WrongResultError(
                f'{name} of {case} is off by {error:.1e}, {allowed:g} is allowed'
            )
        if not all(torch.equal(got, other) for other in again):
            raise WrongResultError(f'{name} of {case} is not the same each time')
        worst = max(worst, error)
    return worst


def timed_op(function: Callable[..., Tensor], case: Case, tensors: list[Tensor | None]):
    """The op without gradients, and with those of all inputs."""
    leaves = [x if x is None else x.detach().requires_grad_() for x in tensors]
    inputs = [x for x in leaves if x is not None]
    options = {**case.options, 'key_mask': None}

    def train() -> None:
        torch.autograd.grad(function(*leaves, **options).sum(), inputs)

    return [torch.no_grad()(lambda: function(*leaves, **options)), train]


def timed_step(backend: ModuleType, case: Case, tensors: list[Tensor | None]):
    """The last step again and again: it writes its token to the same slot."""
    query, key, value, *biases = tensors
    state = new_state(case, len(value), value.device)
    last = torch.full((len(value),), case.form.tokens - 1, device=value.device)
    state = prefill(state, key, value, last)
    token = [None if x is None else x[:, -1] for x in (query, key, value)]
    options = {k: v for k, v in case.options.items() if k != 'causal'}
    step = getattr(backend, f'{case.form.op}_step')
    return [torch.no_grad()(lambda: step(state, *token, *biases, **options))]


def speed(op: str, device: torch.device, dtype: torch.dtype) -> float:
    """Time of eager over that of the kernels, of inference or training, whichever is smaller.

    With Python and launches, which a user waits for, too.
    """
    # Autocast leaves biases in float32; of ordinary size, they take the path that training takes.
    case, is_step = Case(TIMED[op.removesuffix('_step')], 'float32 bias'), op.endswith('_step')
    query, key, value, *biases = case.inputs(device, dtype)
    biases = [x if x is None else x / 10 for x in biases]
    sequences = TIMED_STEP_SEQUENCES if is_step else TIMED_SEQUENCES
    tensors = repeated([query, key, value, *biases], sequences // BATCH)
    seconds = []
    for backend in (eager, library):
        if is_step:
            calls = timed_step(backend, case, tensors)
        else:
            calls = timed_op(getattr(backend, op), case, tensors)
        timers = [Timer('call()', globals=dict(call=call)) for call in calls]
        seconds.append([t.blocked_autorange(min_run_time=TIMING).median for t in timers])
    return min(theirs / ours for theirs, ours in zip(*seconds, strict=True))


def main(op: str, device: torch.device, dtype: torch.dtype) -> None:
    """Check, then time, and say so."""
    interpreted = device.type != 'cuda'
    processors = count_processors(device)
    torch.empty(1, device=device)  # a device that cannot be used says nothing about kernels
    # `torch.empty` gives NaN; what torch has no deterministic form of stays as it is.
    torch.use_deterministic_algorithms(True, warn_only=True)
    worst = 0.0
    try:
        for case in cases(op, device, dtype, processors, interpreted):
            say(case=str(case))
            worst = max(worst, judge(op, case, device, dtype))
        torch.use_deterministic_algorithms(False)
        say(case='timing')
        faster = None if interpreted else speed(op, device, dtype)
    except WrongResultError as wrong:
        say(passed=False, reason=str(wrong))
    except torch.OutOfMemoryError:
        say(unchecked='the device has too little memory left')
    else:
        say(passed=True, error=worst, speed=faster)


if __name__ == '__main__':
    # Should nobody be left to end it. The default action of the signal needs no Python to run.
    signal.alarm(int(sys.argv[4]))
    main(sys.argv[1], torch.device(sys.argv[2]), getattr(torch, sys.argv[3]))
