"""Keep freed memory in the process, or return it to the system.

glibc unmaps every tensor of more than 32 MiB, and zeroed pages then take much time.
"""

import ctypes
import os
import sys

from aft_mm.errors import UserError

ENVIRONMENT_VARIABLE = 'AFT_MM_MALLOC'
MODES = ('keep', 'system')
# From malloc.h; -1 is the largest threshold.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory; return whether it does.

    Does nothing with ``AFT_MM_MALLOC=system``, glibc's own variables, or another allocator.
    """
    mode = os.environ.get(ENVIRONMENT_VARIABLE) or MODES[0]
    if mode not in MODES:
        raise UserError(f'{ENVIRONMENT_VARIABLE} must be one of {", ".join(MODES)}, got {mode!r}')
    chosen_by_user = 'glibc.malloc' in os.environ.get('GLIBC_TUNABLES', '') or any(
        name.startswith('MALLOC_') and name.endswith('_') for name in os.environ
    )
    if mode == 'system' or chosen_by_user or not _is_glibc():
        return False
    process = ctypes.CDLL(None)
    return bool(process.mallopt(M_MMAP_MAX, 0) and process.mallopt(M_TRIM_THRESHOLD, -1))


def return_freed_memory() -> bool:
    """Make glibc return every freed tensor at once; return whether it does.

    Holes in glibc's heap would otherwise be part of a measured peak.
    """
    if not _is_glibc():
        return False
    process = ctypes.CDLL(None)
    return bool(process.mallopt(M_MMAP_THRESHOLD, 2**16) and process.mallopt(M_MMAP_MAX, 1_000_000))


def _is_glibc() -> bool:
    if sys.platform != 'linux':
        return False
    try:
        libc = ctypes.CDLL('libc.so.6')
    except OSError:  # musl
        return False
    used, of_libc = (
        ctypes.cast(library.malloc, ctypes.c_void_p).value for library in (ctypes.CDLL(None), libc)
    )
    return used == of_libc and hasattr(libc, 'mallopt')
