"""Compilation of the CUDA C++ kernels by NVRTC, without a GPU, and the cache of its results."""

import logging
import os
import re
import subprocess
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from aft_mm.ops import aft_conv, dispatch, kernel_check
from aft_mm.ops.cuda import availability, nvrtc
from aft_mm.ops.cuda.forms import form_of

pytestmark = pytest.mark.slow

BF16, HALF = torch.bfloat16, torch.float16
LACKS = nvrtc.missing()
needs_nvrtc = pytest.mark.skipif(bool(LACKS), reason=f'the cuda backend {LACKS}')
CAPABILITIES = [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]


def form(grid, kernel, dtype=BF16, share=1, causal=False, masked=False):
    return form_of(grid, kernel, dtype, share, 'sigmoid', True, causal, masked)


# Each source, and each branch of its preprocessor.
SMALL_FORMS = [
    form((3, 4), (3, 3)),
    form((3, 5), (3, 3), share=2, masked=True),
    form((2, 40), (3, 3)),
    form((1, 33), (1, 5), HALF, share=2, masked=True),
    form((40,), (5,), causal=True),
    form((3, 26), (3, 3), causal=True),
    form((3, 17), (3, 3), torch.float32),
]


@needs_nvrtc
@pytest.mark.parametrize(
    'capability',
    [
        pytest.param(
            chip,
            id='sm_{}{}'.format(*chip),
            marks=[pytest.mark.nightly] * (chip != (9, 0)),
        )
        for chip in CAPABILITIES
    ],
)
def test_every_chip_compiles(capability):
    for each in SMALL_FORMS if capability == (8, 0) else SMALL_FORMS[::5]:
        assert nvrtc.compile_source(each.name, each.macros, capability)[:4] == b'\x7fELF'


def counts(found, folder):
    """Return registers, bytes of stack, and instructions for each kernel."""
    tools = pytest.importorskip('triton', reason='its disassembler is needed').__file__
    tools = Path(tools).parent / 'backends/nvidia/bin'
    path = folder / 'kernels.cubin'
    path.write_bytes(nvrtc.compile_source(found.name, found.macros, (9, 0)))
    shown = [tools / 'cuobjdump', '--dump-resource-usage', path], [tools / 'nvdisasm', '-c', path]
    usage, code = (
        subprocess.run(x, capture_output=True, text=True, check=True).stdout for x in shown
    )
    result = {}
    for name, numbers in re.findall(r'Function (\w+):\s*\n\s*(.*)', usage):
        (part,) = re.findall(
            rf'\n\s*\.section\s+\.text\.{name},(.*?)(?=\n\s*\.section|\Z)', code, re.S
        )
        words = re.findall(r'^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?([A-Z0-9]+)', part, re.M)
        sizes = {
            key: int(number) for key, number in re.findall(r'(REG|STACK|LOCAL):(\d+)', numbers)
        }
        result[name] = Counter(words) + Counter(sizes)
        result[name]['all'] = len(words)
    return result


@needs_nvrtc
def test_instructions_for_14_x_14(tmp_path):
    """A product of 16 x 8 x 16 for each pair of rows and half of the columns, and few others."""
    found = counts(form((14, 14), (11, 11)), tmp_path)
    forward, backward = found['conv_forward_kernel'], found['conv_backward_kernel']
    assert forward['HMMA'] == 264 and backward['HMMA'] == 776 and backward['MOVM'] == 112
    for name in ('BAR', 'STS', 'LDS', 'LOCAL'):
        assert forward[name] == 0
    assert backward['BAR'] == 0
    # 1,568 numbers per warp.
    assert forward['REG'] <= 128 and forward['STACK'] <= 200 and forward['all'] <= 2200
    assert backward['REG'] <= 255 and backward['STACK'] <= 200 and backward['all'] <= 6400


@pytest.mark.nightly
@needs_nvrtc
def test_instructions_for_32_x_32(tmp_path):
    found = counts(form((32, 32), (11, 11)), tmp_path)
    for name in ('forward', 'targets', 'sources'):
        kernel = found[f'conv_{name}_kernel']
        # 11 rows of the loop, each with 11 rows of sources times 4 blocks; sums of leaving rows, and
        # a loop that sums a map.
        assert 11 * (11 * 6 + 4) <= kernel['HMMA'] <= 11 * (11 * 6 + 4) + 40
        assert kernel['BAR'] == kernel['STS'] == kernel['LOCAL'] == 0
        assert kernel['REG'] <= 255 and kernel['STACK'] <= 300 and kernel['all'] <= 8200
    weight = found['conv_weight_kernel']
    assert weight['BAR'] == weight['STACK'] == 0 and weight['REG'] <= 255


@needs_nvrtc
def test_a_source_that_does_not_compile_is_one_line():
    with pytest.raises(
        nvrtc.CompileError, match='NVRTC .*: NVRTC_ERROR_COMPILATION .*error'
    ) as error:
        nvrtc.compile_source('conv_small', (('H', 3),), (9, 0))
    assert '\n' not in str(error.value)
    with pytest.raises(nvrtc.CompileError, match='NVRTC_ERROR_INVALID_OPTION'):
        nvrtc.compile_source(SMALL_FORMS[0].name, SMALL_FORMS[0].macros, (99, 0))


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A compiler that only counts."""
    calls = []

    def compile_source(*arguments):
        calls.append(arguments)
        return b'code'

    nvrtc._warn.cache_clear()
    monkeypatch.setattr(nvrtc, 'compile_source', compile_source)
    monkeypatch.setattr(nvrtc, '_version', lambda: (13, 0))
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    return SimpleNamespace(calls=calls, folder=tmp_path / 'aft_mm/kernels')


CALL = 'conv_small', (('H', 3),), (9, 0)


def test_compiled_once_for_source_macros_and_chip(cache, monkeypatch):
    for _ in range(2):
        assert nvrtc.compiled(*CALL) == b'code'
    assert len(cache.calls) == 1
    nvrtc.compiled('conv_any', *CALL[1:])
    nvrtc.compiled(CALL[0], (('H', 4),), CALL[2])
    nvrtc.compiled(*CALL[:2], (8, 0))
    monkeypatch.setattr(nvrtc, '_read', lambda name: b'other')
    nvrtc.compiled(*CALL)
    assert len(cache.calls) == len(list(cache.folder.iterdir())) == 5


@pytest.mark.parametrize('damage', [b'', b'\0' * 40, b'x'])
def test_a_damaged_file_is_compiled_again(damage, cache):
    nvrtc.compiled(*CALL)
    (path,) = cache.folder.iterdir()
    path.write_bytes(damage or path.read_bytes()[:-1])
    assert nvrtc.compiled(*CALL) == b'code' and len(cache.calls) == 2
    assert nvrtc.compiled(*CALL) == b'code' and len(cache.calls) == 2


def test_a_folder_that_cannot_be_written(cache, caplog):
    cache.folder.parent.write_text('a file')
    for _ in range(2):
        assert nvrtc.compiled(*CALL) == b'code'
    assert len(cache.calls) == 2
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.startswith('compiled kernels are not kept, each process compiles them: ')


def test_partial_files_of_killed_processes_are_removed(cache):
    cache.folder.mkdir(parents=True)
    old, new = cache.folder / 'old.partial', cache.folder / 'new.partial'
    for path in (old, new):
        path.touch()
    os.utime(old, (time.time() - 2 * nvrtc.ABANDONED,) * 2)
    nvrtc.compiled(*CALL)
    assert not old.exists() and new.exists()


def test_what_is_missing_is_a_reason(monkeypatch):
    nvrtc.missing.cache_clear()
    monkeypatch.setattr(nvrtc.importlib.util, 'find_spec', lambda name: None)
    assert nvrtc.missing().startswith('needs the package cuda-bindings')
    nvrtc.missing.cache_clear()

    def fail():
        raise RuntimeError('libnvrtc.so\nis not there')

    monkeypatch.setattr(nvrtc.importlib.util, 'find_spec', lambda name: name)
    monkeypatch.setattr(nvrtc, '_version', fail)
    assert nvrtc.missing() == 'finds no NVRTC: libnvrtc.so is not there'
    nvrtc.missing.cache_clear()


def test_a_failure_is_found_once_and_logged(monkeypatch, caplog):
    def old_driver(*arguments):
        raise nvrtc.CompileError('the driver answers CUDA_ERROR_UNSUPPORTED_PTX_VERSION')

    nvrtc.failure.cache_clear()
    monkeypatch.setattr(nvrtc, '_module', old_driver)
    for _ in range(2):
        reason = nvrtc.failure('conv_small', (), 0)
    assert (
        reason
        == 'cannot compile conv_small.cu: the driver answers CUDA_ERROR_UNSUPPORTED_PTX_VERSION'
    )
    assert [r.message for r in caplog.records] == [f'the cuda backend is not used: {reason}']
    nvrtc.failure.cache_clear()


LACKING = {
    'runs on NVIDIA devices only': (torch.version, 'hip', '7.0'),
    'finds no CUDA device': (torch.cuda, 'is_available', lambda: False),
    'needs compute capability 8.0, got 7.5': (
        torch.cuda,
        'get_device_capability',
        lambda index: (7, 5),
    ),
    'finds no NVRTC: it is gone': (nvrtc, 'missing', lambda: 'finds no NVRTC: it is gone'),
}


@pytest.mark.parametrize('reason', LACKING)
def test_machines_that_lack_something(reason, monkeypatch):
    availability.ask_machine.cache_clear()
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda index: (9, 0))
    monkeypatch.setattr(nvrtc, 'missing', lambda: '')
    assert availability.machine_reasons('cuda', 0) == ()
    availability.ask_machine.cache_clear()
    monkeypatch.setattr(*LACKING[reason])
    assert availability.machine_reasons('cuda', 0) == (reason,)
    availability.ask_machine.cache_clear()


def test_a_kernel_that_does_not_compile_leaves_the_call_to_the_next_backend(monkeypatch):
    monkeypatch.setattr(availability, 'machine_reasons', lambda kind, index: ())
    monkeypatch.setattr(
        nvrtc, 'failure', lambda name, macros, index: f'cannot compile {name}.cu: no'
    )
    tokens, weight = torch.randn(2, 12, 4).bfloat16(), torch.randn(4, 3, 3)
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, 'cuda')
    with pytest.raises(dispatch.BackendError, match='cuda: cannot compile conv_small.cu: no'):
        aft_conv(tokens, tokens, tokens, weight, grid=(3, 4))
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, 'cuda,eager')
    assert aft_conv(tokens, tokens, tokens, weight, grid=(3, 4)).isfinite().all()


on_a_device = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')


@pytest.mark.cuda
@on_a_device
@pytest.mark.parametrize('dtype', [BF16, HALF], ids=str)
def test_the_kernels_on_a_device(dtype):
    result = kernel_check.check_op('aft_conv', torch.device('cuda'), dtype, 'cuda')
    assert result.startswith('right'), result


@pytest.mark.cuda
@on_a_device
def test_more_than_2_to_the_31_numbers(monkeypatch):
    """Equals the last of many sequences alone."""
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip('needs 60 GB of device memory')
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, 'cuda')
    one = torch.randn(1, 2000, 1024, device='cuda', dtype=BF16)
    many = one.new_zeros(1024, 1100, 2000).movedim(0, 2)  # channel-major
    many[-1] = one[0]
    weight = torch.randn(1024, 3, 3, device='cuda')
    got = aft_conv(many, many, many, weight, grid=(40, 50))[-1:]
    assert torch.equal(got, aft_conv(one, one, one, weight, grid=(40, 50)))
