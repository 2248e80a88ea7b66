"""Memory that is freed stays with the process, where glibc would hand it back to the system.

glibc maps every tensor of more than 32 MiB anew and unmaps it when it is freed, so that each
operation on long sequences waits for zeroed pages: of 32,768 tokens of 256 channels that is half of
the time, and cost grows faster than the length. ``AFT_MM_MALLOC`` is read by the tools:

- ``keep``, the default: one heap, which grows and is used again.
- ``system``: glibc as it is.
"""

import ctypes
import os
import sys

from aft_mm.errors import UserError

ENVIRONMENT_VARIABLE = 'AFT_MM_MALLOC'
MODES = ('keep', 'system')
# Of malloc.h; −1 is the largest threshold.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Let glibc keep what is freed, in this process and those that it forks; whether it does.

    It does not where ``AFT_MM_MALLOC`` or glibc's own variables say otherwise, where another
    allocator is preloaded, and where the C library is another.

    Raises:
        UserError: ``AFT_MM_MALLOC`` is none of :data:`MODES`.
    """
    asked = os.environ.get(ENVIRONMENT_VARIABLE) or MODES[0]
    if asked not in MODES:
        raise UserError(f'{ENVIRONMENT_VARIABLE} must be one of {", ".join(MODES)}, got {asked!r}')
    if asked == 'system' or _chosen_by_user() or not _glibc_serves():
        return False
    process = ctypes.CDLL(None)
    return bool(process.mallopt(M_MMAP_MAX, 0) and process.mallopt(M_TRIM_THRESHOLD, -1))


def _chosen_by_user() -> bool:
    """Whether a variable that glibc reads at the start of a process sets its allocator."""
    return 'glibc.malloc' in os.environ.get('GLIBC_TUNABLES', '') or any(
        name.startswith('MALLOC_') and name.endswith('_') for name in os.environ
    )


def _glibc_serves() -> bool:
    """Whether the malloc that the process calls is glibc's."""
    if sys.platform != 'linux':
        return False
    try:
        libc = ctypes.CDLL('libc.so.6')
    except OSError:  # musl
        return False
    used, own = (
        ctypes.cast(library.malloc, ctypes.c_void_p).value for library in (ctypes.CDLL(None), libc)
    )
    return used == own and hasattr(libc, 'mallopt')
