"""Fixtures of the tests of the ops."""

import contextlib
import functools
import math
from types import SimpleNamespace

import numpy as np
import pytest

from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE
from aft_mm.ops.triton import availability as triton_availability


@pytest.fixture
def eager(monkeypatch):
    """Use operations of torch; the C++ loops are tested in test_native.py."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'eager')


@pytest.fixture
def triton_asked_for(monkeypatch):
    """Select the Triton backend, without which a call fails with the reasons."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'triton')
    if triton_availability.interpreted():
        with _faster_and_as_on_a_device(monkeypatch):
            yield
    else:
        yield


@contextlib.contextmanager
def _faster_and_as_on_a_device(monkeypatch):
    """Speed up Triton's interpreter, and round tf32 operands like a device.

    Functions are patched and types looked up once, scans are vectorised, shapes are cached, and
    sums of indices are not checked for overflow.
    """
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    exact = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, total, precision, most):
        if precision.name == 'TF32':
            a, b = (type(x)(_cut_to_tf32(x.data), x.dtype) for x in (a, b))
        return exact(self, a, b, total, precision, most)

    monkeypatch.setattr(interpreter.InterpreterBuilder, 'create_dot', create_dot)
    monkeypatch.setattr(interpreter.ScanOps, 'generic_scan', _scan_rows)
    find_type = functools.cache(interpreter._get_np_dtype)

    def find_type_once(kind):
        return np.dtype(np.uint64) if kind.scalar.is_ptr() else find_type(kind.scalar)

    monkeypatch.setattr(interpreter, '_get_np_dtype', find_type_once)
    monkeypatch.setattr(TritonSemantic, 'binary_op_sanitize_overflow_impl', lambda *args: None)
    monkeypatch.setattr(tl.core.tensor, '__init__', _make_tensor)
    monkeypatch.setattr(tl.core.block_type, '__init__', _make_block_type)
    replaced = interpreter._patch_lang(SimpleNamespace(__globals__=dict(tl=tl, core=tl.core)))
    nothing = interpreter._LangPatchScope()
    monkeypatch.setattr(interpreter, '_patch_lang', lambda function: nothing)
    yield
    replaced.restore()


def _make_tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _shape_of_tensor(tuple(type.shape) if type.is_block() else ())


@functools.cache
def _shape_of_tensor(sizes):
    import triton.language as tl

    return tl.constexpr(math.prod(sizes)), tl.core.tuple([tl.constexpr(size) for size in sizes])


def _make_block_type(self, element_ty, shape):
    sizes = tuple([getattr(size, 'value', size) for size in shape])
    self.element_ty, self.name = element_ty, f'<{sizes}, {element_ty}>'
    self.numel, self.shape = _shape_of_type(sizes)


@functools.cache
def _shape_of_type(sizes):
    import triton.language as tl

    return tl.core.validate_block_shape(sizes), tl.core.tuple(sizes)


def _scan_rows(self, inputs):
    """Compute running sums of several tensors by doubling the number of rows in each step."""
    assert self.axis == 0
    sums, step, rows = inputs, 1, np.arange(len(inputs[0].handle.data))
    while step < len(rows):
        earlier = (x.handle.data[np.maximum(rows - step, 0)] for x in sums)
        earlier = [self.to_tensor(x, y.dtype) for x, y in zip(earlier, sums, strict=True)]
        joined = self.combine_fn.fn(*earlier, *sums)
        has_earlier = (rows >= step)[:, None]
        sums = [
            self.to_tensor(np.where(has_earlier, x.handle.data, y.handle.data), y.dtype)
            for x, y in zip(joined, sums, strict=True)
        ]
        step *= 2
    return sums


def _cut_to_tf32(x):
    """Return float32 numbers without the last 13 bits of their mantissa."""
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


@pytest.fixture(params=[90], ids=lambda capability: f'sm_{capability}')
def compiled(request, monkeypatch):
    """Compile Triton kernels when ops are called on CPU tensors; return them by name.

    For compute capability 9.0, or those of `compiled_for`.
    """
    pytest.importorskip('triton', reason='Triton is not installed')
    if triton_availability.interpreted():
        pytest.skip("Triton's interpreter does not compile")
    from triton.runtime import JITFunction, driver

    from .triton_offline import OfflineDriver

    kernels, run = {}, JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernels[self.__name__] = run(self, *args, grid=grid, warmup=True, **options)

    monkeypatch.setattr(JITFunction, 'run', compile_only)
    # Restoring the active driver would look for a device.
    monkeypatch.setattr(driver, '_active', OfflineDriver(request.param))
    return kernels


@pytest.fixture
def cuts(request, monkeypatch):
    """Use small blocks, or those of the devices with 'shipped'.

    Short sequences then have several tiles of 32 tokens and channels in products, and of 16 and 8
    tokens in running sums.
    """
    if getattr(request, 'param', 'small') == 'shipped':
        return
    from aft_mm.ops.triton import block_sizes, conv, full_local

    for kernel, groups in ('scan', 8), ('scan_backward', 4):
        small = block_sizes.ScanBlock(groups, rows=2, row_bytes=64, warps=1)
        monkeypatch.setitem(block_sizes.BLOCKS, kernel, {(8, 0): small})
    sizes = dict(tile=32, width=32, step=16, warps=4)
    for kind, entries in block_sizes.BLOCKS.items():
        if kind.startswith('product'):
            small = {least: cut._replace(**sizes) for least, cut in entries.items()}
            monkeypatch.setitem(block_sizes.BLOCKS, kind, small)
    if (
        triton_availability.interpreted()
    ):  # whose time depends on the number of steps, not on their size
        monkeypatch.setattr(full_local, 'GROUP', 32)
        monkeypatch.setattr(full_local, 'ROWS_WEIGHED', 32)
        monkeypatch.setattr(conv, 'MOVED', (256, 8, 8))
