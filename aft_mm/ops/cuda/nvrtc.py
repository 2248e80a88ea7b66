"""Compile CUDA C++ when a call first needs it, keep the result on the disk, and launch it."""

import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.util
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
HEADERS = ('conv.h', 'warp.h')
#: Macros of a compilation.
Macros = tuple[tuple[str, int], ...]
DIGEST = hashlib.sha256().digest_size
# Seconds after which the partial file of a killed process is removed.
ABANDONED = 3600
logger = logging.getLogger('aft_mm.ops')


class CompileError(RuntimeError):
    """A source that NVRTC or the driver refuses."""


@functools.cache
def missing() -> str:
    try:
        found = importlib.util.find_spec('cuda.bindings.nvrtc')
    except ModuleNotFoundError:
        found = None
    if found is None:
        return 'needs the package cuda-bindings, which comes with the CUDA wheels of torch'
    try:
        _version()
    except Exception as error:  # the library, which the bindings load late
        return f'finds no NVRTC: {_one_line(error)}'
    return ''


def _one_line(error: object) -> str:
    return ' '.join(str(error).split())[:300]


def _call(function: Any, *arguments: Any, what: str) -> Any:
    status, *results = function(*arguments)
    if status.value:
        raise CompileError(f'{what} answers {status.name}')
    return results[0] if len(results) == 1 else results


def _nvrtc() -> Any:
    return importlib.import_module('cuda.bindings.nvrtc')


def _driver() -> Any:
    return importlib.import_module('cuda.bindings.driver')


@functools.cache
def _version() -> tuple[int, int]:
    return tuple(_call(_nvrtc().nvrtcVersion, what='NVRTC'))


@functools.cache
def _read(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


def compile_source(name: str, macros: Macros, capability: tuple[int, int]) -> bytes:
    nvrtc = _nvrtc()
    source, headers = _read(f'{name}.cu'), [_read(header) for header in HEADERS]
    names = [header.encode() for header in HEADERS]
    given = source, f'{name}.cu'.encode(), len(names), headers, names
    program = _call(nvrtc.nvrtcCreateProgram, *given, what='NVRTC')
    options = ['-std=c++17', '-arch=sm_{}{}'.format(*capability)]
    options += [f'-D{macro}={value}' for macro, value in macros]
    try:
        words = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(words), words)
        if status.value:
            log = b' ' * _call(nvrtc.nvrtcGetProgramLogSize, program, what='NVRTC')
            _call(nvrtc.nvrtcGetProgramLog, program, log, what='NVRTC')
            text = _one_line(log.decode(errors='replace').strip('\0 '))
            raise CompileError(f'NVRTC {_version()[0]}.{_version()[1]}: {status.name} {text}')
        cubin: bytes = b' ' * _call(nvrtc.nvrtcGetCUBINSize, program, what='NVRTC')
        _call(nvrtc.nvrtcGetCUBIN, program, cubin, what='NVRTC')
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def cache_folder() -> Path:
    parent = os.environ.get('XDG_CACHE_HOME')
    return (Path(parent) if parent else Path.home() / '.cache') / 'aft_mm' / 'kernels'


def compiled(name: str, macros: Macros, capability: tuple[int, int]) -> bytes:
    """Return the cubin from the disk, or compile it and keep it there."""
    parts = [_read(file) for file in (f'{name}.cu', *HEADERS)]
    parts.append(repr((macros, capability, _version())).encode())
    file = f'{name}.{hashlib.sha256(b"".join(parts)).hexdigest()[:32]}.cubin'
    try:
        content = (cache_folder() / file).read_bytes()
    except (OSError, RuntimeError):  # no such file, or no home
        content = b''
    if content[:DIGEST] == hashlib.sha256(content[DIGEST:]).digest():
        return content[DIGEST:]
    cubin = compile_source(name, macros, capability)
    try:
        _write(cache_folder() / file, hashlib.sha256(cubin).digest() + cubin)
    except (OSError, RuntimeError) as error:
        _warn(f'compiled kernels are not kept, each process compiles them: {error}')
    return cubin


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for other in path.parent.glob('*.partial'):
        with contextlib.suppress(FileNotFoundError):  # another process finishes it
            if time.time() - other.stat().st_mtime > ABANDONED:
                other.unlink()
    descriptor, partial = tempfile.mkstemp(suffix='.partial', dir=path.parent)
    try:
        with os.fdopen(descriptor, 'wb') as file:
            file.write(content)
        os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)


@functools.cache
def _warn(message: str) -> None:
    logger.warning(message)


@functools.cache
def _module(name: str, macros: Macros, index: int) -> Any:
    torch.cuda.init()
    with torch.cuda.device(index):  # torch's context is current
        cubin = compiled(name, macros, torch.cuda.get_device_capability(index))
        return _call(_driver().cuModuleLoadData, cubin, what='the driver')


@functools.cache
def failure(name: str, macros: Macros, index: int) -> str:
    try:
        _module(name, macros, index)
    except Exception as error:  # also of the bindings, which raise their own kinds
        reason = f'cannot compile {name}.cu: {_one_line(error)}'
        _warn(f'the cuda backend is not used: {reason}')
        return reason
    return ''


@functools.cache
def _function(name: str, macros: Macros, kernel: str, index: int) -> Any:
    module = _module(name, macros, index)
    return _call(_driver().cuModuleGetFunction, module, kernel.encode(), what='the driver')


def launch(
    name: str,
    macros: Macros,
    kernel: str,
    grid: tuple[int, int],
    threads: int,
    arguments: ctypes.Structure,
    index: int,
) -> None:
    """Launch a kernel, whose only argument is a structure, on torch's stream of the device."""
    pointer = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
    stream = torch.cuda.current_stream(index).cuda_stream
    function = _function(name, macros, kernel, index)
    blocks = *grid, 1, threads, 1, 1, 0
    address = ctypes.addressof(pointer)
    _call(_driver().cuLaunchKernel, function, *blocks, stream, address, 0, what='the driver')
