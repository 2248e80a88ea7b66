"""The folder of compiled CUDA kernels, with processes that share it, end early or cannot write."""

import multiprocessing
import os
import resource
import signal
from pathlib import Path

import pytest
import torch

from aft_mm.ops.cuda import nvrtc
from aft_mm.ops.cuda.forms import form_of

LACKS = nvrtc.missing()
FORKED = multiprocessing.get_context('fork')


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    nvrtc._warn.cache_clear()
    return tmp_path / 'aft_mm/kernels'


def compile_with_others(barrier, results):
    form = form_of((3, 4), (3, 3), torch.bfloat16, 1, 'sigmoid', True, False, False)
    barrier.wait(60)
    results.put(nvrtc.compiled(form.name, form.macros, (9, 0)))


def run_together(count):
    """Compile one source in processes that start at once; return what each gets."""
    barrier, results = FORKED.Barrier(count), FORKED.Queue()
    arguments = barrier, results
    processes = [FORKED.Process(target=compile_with_others, args=arguments) for _ in range(count)]
    for process in processes:
        process.start()
    found = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return found


@pytest.mark.skipif(bool(LACKS), reason=f'the cuda backend {LACKS}')
def test_processes_compile_at_once_and_one_is_killed(folder, monkeypatch):
    first, second = run_together(2)
    assert first == second and first[:4] == b'\x7fELF'
    (path,) = folder.iterdir()
    assert path.suffix == '.cubin' and path.read_bytes().endswith(first)
    with monkeypatch.context() as patch:  # now nobody compiles
        patch.setattr(nvrtc, 'compile_source', None)
        assert run_together(1) == [first]
    path.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(os, 'replace', lambda *names: os.kill(os.getpid(), signal.SIGKILL))
        killed = FORKED.Process(
            target=compile_with_others, args=(FORKED.Barrier(1), FORKED.Queue())
        )
        killed.start()
        killed.join(120)
        assert killed.exitcode == -signal.SIGKILL
    (partial,) = folder.iterdir()
    assert partial.suffix == '.partial'  # which nothing reads, and a later process removes
    assert run_together(1) == [first] and sorted(folder.iterdir()) == sorted([partial, path])


def test_a_disk_that_becomes_full(folder, monkeypatch, caplog):
    monkeypatch.setattr(nvrtc, 'compile_source', lambda *arguments: b'code')
    monkeypatch.setattr(nvrtc, '_version', lambda: (13, 0))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        assert nvrtc.compiled('conv_small', (), (9, 0)) == b'code'
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (record,) = caplog.records
    assert record.message.startswith('compiled kernels are not kept, each process compiles them: ')
    assert '\n' not in record.message and not list(folder.iterdir())


def test_no_home(folder, monkeypatch, caplog):
    def home():
        raise RuntimeError('Could not determine home directory.')

    monkeypatch.delenv('XDG_CACHE_HOME')
    monkeypatch.setattr(Path, 'home', home)
    monkeypatch.setattr(nvrtc, 'compile_source', lambda *arguments: b'code')
    monkeypatch.setattr(nvrtc, '_version', lambda: (13, 0))
    assert nvrtc.compiled('conv_small', (), (9, 0)) == b'code'
    assert 'are not kept, each process compiles them: Could not determine home' in caplog.text


def test_a_partial_file_that_another_process_finishes(folder, monkeypatch):
    monkeypatch.setattr(Path, 'glob', lambda path, pattern: [path / 'gone.partial'])
    nvrtc._write(folder / 'name.cubin', b'content')
    assert (folder / 'name.cubin').read_bytes() == b'content'
