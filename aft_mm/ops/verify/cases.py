"""What a kernel is put through: every form of an op, on inputs that break kernels.

What the backend has a kernel for, of the options below, is put through every length and, in one
length, through every twist; twists for which a kernel is compiled anew take the forms in turn.
Triton's interpreter, which is slow, sees one length and takes all twists in turn: it shows that
kernel and check fit, not what a device does.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..geometry import near_radius
from ..triton import support

# Tokens, channels, heads of aft_conv and grid: one token, both sides of a tile, several tiles, and
# channels that fill no block, a block, and many.
SIZES = (
    (1, 24, 3, (1, 1)),
    (63, 64, 64, (7, 9)),
    (64, 384, 16, (8, 8)),
    (65, 65, 5, (5, 13)),
    (200, 24, 2, (10, 20)),
)
# In which every twist is tried.
TWISTED = (65, 65, 5, (5, 13))
INTERPRETED = (18, 12, 3, (3, 6))
# What can be done to the inputs of an op, and of a step, which has no mask.
TWISTS = ('masked', 'raised', 'lowered', 'spike', 'large bias', 'crowd')
STEP_TWISTS = TWISTS[1:]
# The same; a kernel is compiled anew for each of them.
COMPILED_ANEW = ('strided', 'float32 bias', 'ungated', 'relu gate')
BATCH = 3
# Sequences per multiprocessor of a crowd: more programs than fit at once, of any block size.
CROWD = 16
RANK = 5
WINDOW = 33
BIAS = 59.0
# Errors count against the largest entry of a tensor, or against this if that is larger: where one
# key takes all the weight, gradients are differences of terms of about one that cancel to 0.
FLOOR, FLOOR_OF_TERMS = 1e-3, 1.0


@dataclass(frozen=True)
class Form:
    """An op with its options, and the shapes [B, T, D], heads and bias parameters that it takes."""

    op: str
    tokens: int
    channels: int
    options: dict[str, Any]
    heads: int
    parameters: tuple[tuple[int, ...], ...] = ()
    sources: int | None = None  # where they may differ from the tokens

    def __str__(self) -> str:
        options = ', '.join(f'{name}={value}' for name, value in self.options.items())
        biases = ' and '.join(map(str, map(list, self.parameters)))
        sources = self.sources and f'S={self.sources}'
        sizes = [f'T={self.tokens}', sources, f'D={self.channels}']
        about = [*sizes, options, biases and f'bias {biases}']
        return ', '.join(filter(None, about))


@dataclass(frozen=True)
class Case:
    """A form with a twist; `copies` are how often the sequences are repeated."""

    form: Form
    twist: str = 'plain'
    copies: int = 1

    def __str__(self) -> str:
        return f'{self.twist}: {self.form}'

    @property
    def options(self) -> dict[str, Any]:
        """Every option of the call but the mask, which goes with the tensors."""
        gate = {'ungated': 'none', 'relu gate': 'relu'}.get(self.twist)
        return {**self.form.options, **(dict(gate=gate) if gate else {})}

    @property
    def floor(self) -> float:
        """Below which largest entry of a tensor the error counts against this number."""
        large = self.twist in ('raised', 'lowered', 'spike', 'large bias')
        return FLOOR_OF_TERMS if large or self.form.tokens == 1 else FLOOR

    def inputs(self, device: torch.device, dtype: torch.dtype) -> list[Tensor | None]:
        """query, key, value and bias parameters, all randn but for the twist, on the device."""
        form, generator = self.form, torch.Generator().manual_seed(0)
        sources = form.sources or form.tokens
        sizes = (form.tokens, form.channels), (sources, form.heads), (sources, form.channels)

        def randn(shape: tuple[int, ...]) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        query, key, value = (randn((BATCH, *size)) for size in sizes)
        biases = [randn(shape) for shape in form.parameters]
        if self.twist in ('raised', 'lowered'):
            key = key + (1e4 if self.twist == 'raised' else -1e4)
        elif self.twist == 'spike':
            key[:, -1] += 1000
        elif self.twist == 'large bias':
            biases = _large(biases)
        bias_dtype = torch.float32 if self.twist == 'float32 bias' else dtype
        tensors = [x.to(device, dtype) for x in (query, key, value)]
        if self.twist == 'strided':
            tensors = _strided(*tensors)
        parameters = [x.to(device, bias_dtype) for x in biases]
        if 'window' in form.options and len(parameters) == 1:
            parameters.append(None)  # a free bias instead of factors
        return [None if self.twist == 'ungated' else tensors[0], *tensors[1:], *parameters]

    def mask(self, device: torch.device) -> Tensor | None:
        """key_mask [B, S] for the twist that needs one; the second sequence sees nothing."""
        if self.twist != 'masked':
            return None
        shape = BATCH, self.form.sources or self.form.tokens
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.6
        mask[1] = False
        return mask.to(device)


def _large(biases: list[Tensor]) -> list[Tensor]:
    """Biases of ±:data:`BIAS`, factors such that their products are."""
    if len(biases) == 1:
        return [BIAS * biases[0].sign()]
    factors = [torch.zeros_like(x) for x in biases]
    factors[0][:, 0], factors[1][:, 0] = BIAS, biases[1][:, 0].sign()
    return factors


def _strided(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """The same numbers: tokens first in memory, channels first, every other one."""
    every_other = torch.full((*value.shape[:2], 2 * value.shape[2]), torch.nan).to(value)
    every_other[..., ::2] = value
    return [
        query.transpose(0, 1).contiguous().transpose(0, 1),
        key.transpose(1, 2).contiguous().transpose(1, 2),
        every_other[..., ::2],
    ]


def _local(
    op: str, tokens: int, channels: int, grid: tuple[int, int], causal: bool
) -> Iterator[Form]:
    factors = ((tokens, RANK), (tokens, RANK))
    for window, places in ((WINDOW, None), ((2, 4), grid)):
        options = dict(window=window, grid=places, causal=causal)
        yield Form(op, tokens, channels, options, channels, factors)
    columns = near_radius(WINDOW, None) + 1
    free = ((tokens, columns if causal else 2 * columns - 1),)
    options = dict(window=WINDOW, grid=None, causal=causal)
    yield Form(op, tokens, channels, options, channels, free)


def _forms(
    op: str, tokens: int, channels: int, heads: int, grid: tuple[int, int], causal: bool
) -> Iterator[Form]:
    """Every form of the op of these sizes, whether it has a kernel or not."""
    options: dict[str, Any]
    if op == 'aft_simple':
        for key_function in ('softmax', 'relu', 'relu2'):
            options = dict(key_function=key_function, causal=causal)
            yield Form(op, tokens, channels, options, channels)
        if not causal:
            options = dict(key_function='softmax', causal=causal)
            yield Form(op, tokens, channels, options, channels, sources=tokens // 2 + 3)
    elif op == 'aft_full':
        for sources in (tokens, *(() if causal else (tokens // 2 + 3,))):
            bias = ((tokens, sources),)
            yield Form(op, tokens, channels, dict(causal=causal), channels, bias, sources)
    elif op in ('aft_local', 'aft_local_learned'):
        yield from _local(op, tokens, channels, grid, causal)
    elif op == 'aft_conv':
        # In most of the grids the kernel reaches further than the grid in one direction.
        for places, kernel in ((grid, (5, 11)), ((tokens,), (9,))):
            for far in (True, False):
                options = dict(grid=places, global_connectivity=far, causal=causal)
                yield Form(op, tokens, channels, options, heads, ((heads, *kernel),))
    elif op == 'aft_local_hard':
        for window, places in ((WINDOW, None), ((4, 6), grid)):
            options = dict(window=window, grid=places, causal=causal)
            yield Form(op, tokens, channels, options, channels)


def _gate(options: dict[str, Any]) -> dict[str, Any]:
    gate = 'relu' if options.get('key_function') == 'relu2' else 'sigmoid'
    return {**options, 'gate': gate}


def served_forms(
    op: str, device: torch.device, dtype: torch.dtype, size: tuple[int, int, int, tuple[int, int]]
) -> list[Form]:
    """The forms of the op, or of the op that a step belongs to, that have a kernel."""
    forms = []
    # A step takes a token of a causal op; its state, the last of its tensors, is float32.
    family, is_step = op.removesuffix('_step'), op.endswith('_step')
    tensors = [torch.empty(1, 1, 1, device=device, dtype=dtype)] * 3
    tensors += [torch.empty(1, device=device)] * is_step
    for causal in (True,) if is_step else (False, True):
        for form in _forms(family, *size, causal):
            options = _gate(form.options)
            if not support.reasons_against(op, tensors, options):
                forms.append(replace(form, options=options))
    return forms


def _in_turn(forms: list[Form], twists: Sequence[str]) -> list[Case]:
    return [Case(forms[n % len(forms)], twist) for n, twist in enumerate(twists) if forms]


def cases(
    op: str, device: torch.device, dtype: torch.dtype, processors: int, interpreted: bool
) -> list[Case]:
    """What an op or step of the dtype is put through on a device with so many multiprocessors."""
    twists = STEP_TWISTS if op.endswith('_step') else TWISTS
    if interpreted:
        forms = served_forms(op, device, dtype, INTERPRETED)
        found = [Case(form) for form in forms] + _in_turn(forms, (*twists, *COMPILED_ANEW))
    else:
        found = [Case(form) for size in SIZES for form in served_forms(op, device, dtype, size)]
        forms = served_forms(op, device, dtype, TWISTED)
        found += [Case(form, twist) for form in forms for twist in twists]
        found += _in_turn(forms, COMPILED_ANEW)
    crowd = 2 if interpreted else math.ceil(CROWD * processors / BATCH)
    return [
        replace(case, copies=crowd if case.twist == 'crowd' else 1)
        for case in found
        if _makes_sense(case, dtype)
    ]


def _makes_sense(case: Case, dtype: torch.dtype) -> bool:
    form, twist = case.form, case.twist
    if twist in ('large bias', 'float32 bias') and not form.parameters:
        return False
    if twist == 'float32 bias':
        return dtype != torch.float32
    # Unnormalised sums grow with the keys, and relu2 has its gate.
    if form.options.get('key_function', 'softmax') != 'softmax':
        return twist not in ('raised', 'lowered', 'spike', 'ungated', 'relu gate')
    return True


def _timed_band(op: str) -> Form:
    options = _gate(dict(window=32, grid=None, causal=True))
    return Form(op, 1024, 512, options, 512, ((1024, 64), (1024, 64)))


# What an op is timed on: near what the configs train, large enough to fill a device.
TIMED = {
    form.op: form
    for form in (
        Form('aft_simple', 1024, 512, _gate(dict(key_function='softmax', causal=True)), 512),
        Form('aft_full', 1024, 384, _gate(dict(causal=False)), 384, ((1024, 1024),)),
        _timed_band('aft_local'),
        _timed_band('aft_local_learned'),
        Form(
            'aft_conv', 196, 384,
            _gate(dict(grid=(14, 14), global_connectivity=True, causal=False)), 384,
            ((384, 11, 11),),
        ),
        Form('aft_local_hard', 1024, 512, _gate(dict(window=32, grid=None, causal=True)), 512),
    )
}  # fmt: skip
