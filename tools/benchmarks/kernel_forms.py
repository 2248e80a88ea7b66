"""Record the forms of the Triton kernels that code launches, without compiling or running them.

A form is a kernel with the types of its arguments, those that are None, and its constants. Triton
also compiles a form again for numbers that are 1 or multiples of 16; these are not counted.
"""

from contextlib import contextmanager
from unittest import mock

from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from aft_mm.ops import state
from aft_mm.ops.triton import availability, block_sizes, full_local, simple

PROCESSORS = 132


class OfflineDriver:
    def __init__(self, capability):
        self.capability = capability

    def get_current_device(self):
        return self.capability  # compiled kernels are cached per device

    def get_current_stream(self, device=None):
        return 0

    def get_current_target(self):
        return GPUTarget('cuda', self.capability, 32)


class _Driver(OfflineDriver):
    def get_current_device(self):
        return 'recorded'  # also kernels that other tests compiled


def _form(name, signature, constants):
    def describe(kind, path):
        if isinstance(kind, tuple):
            return tuple(describe(x, (*path, i)) for i, x in enumerate(kind))
        if kind == 'constexpr' and type(constants.get(path)) is not int:
            return str(constants.get(path))
        return 'number' if kind in ('i32', 'i64', 'constexpr') else kind

    return name, *(describe(kind, (i,)) for i, kind in enumerate(signature.values()))


@contextmanager
def recorded_forms():
    forms = set()

    def record(self, key, signature, device, constants, *others):
        forms.add(_form(self.__name__, signature, constants))
        return object()

    with offline_kernels(), mock.patch.object(JITFunction, '_do_compile', record):
        yield forms


@contextmanager
def offline_kernels():
    """Compile the kernels that code launches, for a device that need not exist."""
    run = JITFunction.run

    def launch(self, *args, grid, warmup, **options):
        return run(self, *args, grid=grid, warmup=True, **options)

    with (
        mock.patch.object(JITFunction, 'run', launch),
        mock.patch.object(driver, '_active', _Driver(90)),
        mock.patch.object(block_sizes, 'capability', lambda *device: (9, 0)),
        mock.patch.object(full_local, 'count_processors', lambda device: PROCESSORS),
        mock.patch.object(simple, 'count_processors', lambda device: PROCESSORS),
        mock.patch.object(availability, 'machine_reasons', lambda *place: ()),
        mock.patch.object(state, 'check_position', lambda *place: ()),
    ):
        yield
