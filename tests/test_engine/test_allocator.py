"""The tools make glibc reuse freed memory, unless the user says otherwise.

Measurements of a peak return it.
"""

import os
import shutil
import subprocess
import sys

import pytest

from aft_mm.engine.allocator import keep_freed_memory
from aft_mm.errors import UserError

# One after the other; glibc keeps freed blocks of up to 32 MiB by itself. A page is 4 KiB.
FAULTS_OF_BLOCKS = """
import resource, runpy, sys
kept = runpy.run_path('aft_mm/engine/allocator.py')[sys.argv[1]]()  # imports little
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    block = b'x' * int(sys.argv[2])
    del block
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
BLOCK = 2**26
ANOTHER_MALLOC = """
#include <stddef.h>
void *__libc_malloc(size_t size);
void *malloc(size_t size) { return __libc_malloc(size); }
"""
glibc_only = pytest.mark.skipif(
    sys.platform != 'linux' or not os.confstr('CS_GNU_LIBC_VERSION'), reason='glibc only'
)


def run(root, function='keep_freed_memory', block=BLOCK, **variables) -> tuple[bool, float]:
    """What function returns in a fresh process, and how often blocks are mapped, 1 to 8 times."""
    inherited = {name: value for name, value in os.environ.items() if 'MALLOC' not in name}
    done = subprocess.run(
        [sys.executable, '-c', FAULTS_OF_BLOCKS, function, str(block)],
        cwd=root,
        check=True,
        text=True,
        capture_output=True,
        env={**inherited, **variables},
    )
    done, faults = done.stdout.split()
    return done == 'True', int(faults) * 4096 / block


@glibc_only
def test_pages_of_freed_memory_are_used_again(root):
    kept, times = run(root)
    assert kept and times < 1.5
    for variables in (
        dict(AFT_MM_MALLOC='system'),
        dict(MALLOC_MMAP_THRESHOLD_='33554432'),
        dict(GLIBC_TUNABLES='glibc.malloc.arena_max=2'),
    ):
        kept, times = run(root, **variables)
        assert not kept and times > 7, variables


@glibc_only
def test_small_blocks_are_returned_for_a_measurement(root):
    assert run(root, block=2**20, AFT_MM_MALLOC='system')[1] < 3
    returned, times = run(root, 'return_freed_memory', block=2**20)
    assert returned and times > 7


@glibc_only
@pytest.mark.skipif(not shutil.which('cc'), reason='needs a C compiler')
def test_another_allocator_is_left_alone(root, tmp_path):
    library = str(tmp_path / 'malloc.so')
    subprocess.run(
        ['cc', '-shared', '-fPIC', '-xc', '-', '-o', library],
        input=ANOTHER_MALLOC,
        text=True,
        check=True,
    )
    assert not run(root, LD_PRELOAD=library)[0]


def test_a_wrong_setting_is_refused(monkeypatch):
    monkeypatch.setenv('AFT_MM_MALLOC', 'jemalloc')
    with pytest.raises(UserError, match="MALLOC must be one of keep, system, got 'jemalloc'"):
        keep_freed_memory()
