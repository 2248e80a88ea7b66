"""Verdicts on disk: what one is about, and how it is kept so that no reader sees half of it."""

import functools
import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils import collect_env

from ..triton import support

PACKAGE = Path(__file__).parents[1]
# The kernels and their launches, and what is held against them.
SOURCES = ('triton', 'verify')


class Subject(NamedTuple):
    """An op or step, a type of its values, and a device, as strings: ``('cuda', 0)``."""

    op: str
    dtype: str
    device_type: str
    index: int | None

    @property
    def device(self) -> str:
        """The device as torch writes it."""
        return self.device_type if self.index is None else f'{self.device_type}:{self.index}'

    @property
    def command(self) -> str:
        """What a person types to see the check."""
        interpreter = 'TRITON_INTERPRET=1 ' if self.device_type != 'cuda' else ''
        about = f'--op {self.op} --dtype {self.dtype} --device {self.device}'
        return f'{interpreter}python -m aft_mm.ops --verify {about}'

    def __str__(self) -> str:
        return f'{self.op} in {self.dtype} on {self.device}'


@dataclass(frozen=True)
class Verdict:
    """What a check found: the worst error over the largest entry, and the speed over eager's.

    Both are None if the kernels failed, for the `reason` given; `speed` in the interpreter, too.
    """

    passed: bool
    error: float | None = None
    speed: float | None = None
    reason: str | None = None

    def __str__(self) -> str:
        if not self.passed:
            return f'failed: {self.reason}'
        pace = '' if self.speed is None else f', {self.speed:.2f} × the speed of eager'
        return f'passed, worst error {self.error:.1e}{pace}'


def folder() -> Path:
    """Where verdicts are kept, below ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    cache = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
    return Path(cache) / 'aft_mm' / 'verdicts'


@functools.cache
def source_hash() -> str:
    """A hash of the files that a verdict depends on."""
    digest = hashlib.sha256()
    for name in SOURCES:
        for path in sorted((PACKAGE / name).rglob('*.py')):
            digest.update(path.name.encode() + b'\0' + path.read_bytes() + b'\0')
    return digest.hexdigest()


@functools.cache
def about_device(device_type: str, index: int | None) -> dict[str, str | None]:
    """What a kernel is compiled by and for, and runs on."""
    about: dict[str, str | None] = dict(
        torch=torch.__version__, **support.compiler(device_type, index)
    )
    if device_type != 'cuda':
        return dict(device="Triton's interpreter", driver=None, **about)
    driver = collect_env.get_nvidia_driver_version(collect_env.run)
    return dict(device=torch.cuda.get_device_name(index), driver=driver, **about)


def key_of(subject: Subject) -> dict[str, str | None]:
    """What a verdict holds for, and no longer once any of it changes."""
    machine = about_device(subject.device_type, subject.index)
    return dict(op=subject.op, dtype=subject.dtype, sources=source_hash(), **machine)


def path_of(subject: Subject) -> Path:
    """The file of a verdict; another key is another file."""
    digest = hashlib.sha256(json.dumps(key_of(subject), sort_keys=True).encode()).hexdigest()
    return folder() / f'{subject.op}-{subject.dtype}-{digest[:16]}.json'


def load(subject: Subject) -> Verdict | None:
    """The verdict on disk, None if there is none; raises ValueError for a file without one."""
    path = path_of(subject)
    try:
        content = json.loads(path.read_text())
        if content['key'] == key_of(subject):
            return Verdict(**content['verdict'])
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError):
        pass
    raise ValueError(f'{path} holds no verdict')


def save(subject: Subject, verdict: Verdict) -> None:
    """Write the verdict beside its file, then rename: other processes may be reading."""
    path = path_of(subject)
    content = dict(key=key_of(subject), verdict=asdict(verdict))
    half = path.with_suffix(f'.{os.getpid()}.tmp')
    try:
        half.write_text(json.dumps(content, indent=2) + '\n')
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)
