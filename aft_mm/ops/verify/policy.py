"""Whether the kernels of an op may serve unasked: what dispatch asks, and what a person is told.

``AFT_MM_VERIFY`` is read when an op first meets a device:

- ``auto``, the default: verdicts decide, and a missing one is made.
- ``off``: kernels are trusted, and serve without a verdict.
- ``never``: verdicts decide, and a missing one is not made: eager serves.
"""

import os
import warnings

import torch
import torch.distributed as dist

from . import process
from .process import NotCheckedError
from .verdicts import Subject, Verdict

ENVIRONMENT_VARIABLE = 'AFT_MM_VERIFY'
MODES = ('auto', 'off', 'never')

# What this process has found out, by the arguments of `reason_against`: why not, None if they may.
_settled: dict[tuple, str | None] = {}


def mode() -> str:
    """What ``AFT_MM_VERIFY`` says; raises ValueError for anything else."""
    asked = os.environ.get(ENVIRONMENT_VARIABLE) or MODES[0]
    if asked not in MODES:
        raise ValueError(f'{ENVIRONMENT_VARIABLE} must be one of {", ".join(MODES)}, got {asked!r}')
    return asked


def reason_against(
    op: str, dtype: torch.dtype, device_type: str, index: int | None, check: bool, tracing: bool
) -> str | None:
    """Why the kernels may not serve unasked; None if they may.

    `check` lets a missing verdict be made, unless a graph is being compiled, which `tracing` says,
    or captured. Without it nothing is made, remembered or said.
    """
    key = op, dtype, device_type, index
    if key in _settled:
        return _settled[key]
    asked, verdict, reason = mode(), None, None
    if asked != 'off':
        subject = Subject(op, str(dtype).removeprefix('torch.'), device_type, index)
        in_graph = tracing or (device_type == 'cuda' and torch.cuda.is_current_stream_capturing())
        try:
            verdict = process.find(subject, _why_not_made(asked, check, in_graph))
            reason = _objection(verdict)
        except NotCheckedError as error:
            reason = f'has no verdict on this device: {error}'
        if not check:
            return reason
        if reason is not None and asked == 'auto' and (verdict is None or not verdict.passed):
            _warn(subject, reason)
        if in_graph and verdict is None:
            return reason  # the next call outside of a graph may make it
    _settled[key] = reason
    return reason


def _why_not_made(asked: str, check: bool, in_graph: bool) -> str | None:
    if asked == 'never':
        return f'{ENVIRONMENT_VARIABLE}=never makes none'
    if in_graph:
        return 'none is made while a graph is compiled or captured'
    return None if check else 'the first use makes it'


def _objection(verdict: Verdict) -> str | None:
    if not verdict.passed:
        return f'failed its check on this device: {verdict.reason}'
    if verdict.speed is not None and verdict.speed < 1:
        return f'has {verdict.speed:.2f} × the speed of eager on this device'
    return None


def _warn(subject: Subject, reason: str) -> None:
    if not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
        warnings.warn(
            f'eager serves {subject}, because the Triton kernel {reason}; to check it again: '
            f'{subject.command}',
            stacklevel=2,
        )
