"""The tools make glibc reuse freed memory, unless the user says otherwise."""

import os
import shutil
import subprocess
import sys

import pytest

from aft_mm.engine.allocator import keep_freed_memory
from aft_mm.errors import UserError

# One after the other, blocks larger than what glibc keeps by itself; their pages are 4 KiB.
FAULTS_OF_BLOCKS = """
import resource, runpy
kept = runpy.run_path('aft_mm/engine/allocator.py')['keep_freed_memory']()  # imports little
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    block = b'x' * 2**26
    del block
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 2**26 // 4096
ANOTHER_MALLOC = """
#include <stddef.h>
void *__libc_malloc(size_t size);
void *malloc(size_t size) { return __libc_malloc(size); }
"""
glibc_only = pytest.mark.skipif(
    sys.platform != 'linux' or not os.confstr('CS_GNU_LIBC_VERSION'), reason='glibc only'
)


def run(root, **variables: str) -> tuple[bool, int]:
    """Whether memory is kept in a fresh process, and the page faults of 8 blocks."""
    inherited = {name: value for name, value in os.environ.items() if 'MALLOC' not in name}
    done = subprocess.run(
        [sys.executable, '-c', FAULTS_OF_BLOCKS],
        cwd=root,
        check=True,
        text=True,
        capture_output=True,
        env={**inherited, **variables},
    )
    kept, faults = done.stdout.split()
    return kept == 'True', int(faults)


@glibc_only
def test_pages_of_freed_memory_are_used_again(root):
    kept, faults = run(root)
    assert kept and faults < 1.5 * PAGES
    for variables in (
        dict(AFT_MM_MALLOC='system'),
        dict(MALLOC_MMAP_THRESHOLD_='33554432'),
        dict(GLIBC_TUNABLES='glibc.malloc.arena_max=2'),
    ):
        kept, faults = run(root, **variables)
        assert not kept and faults > 7 * PAGES, variables


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
