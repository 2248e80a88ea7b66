"""The check of the Triton kernels: cases, failures, stored results."""

import importlib.util
import json
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from aft_mm.ops import __main__ as program
from aft_mm.ops import dispatch, eager, kernel_results, reference, selftest
from aft_mm.ops.cases import Case
from aft_mm.ops.kernel_results import Result
from aft_mm.ops.selftest import WrongResultError
from aft_mm.ops.triton import availability

CPU = torch.device('cpu')
CALL = 'aft_simple', [torch.zeros(1, 1, 1)] * 3, dict(key_function='softmax', causal=True)
PASSED = Result('passed', error=1e-6, speeds=dict(inference=[1.5, 2.0]))


@pytest.fixture
def machine(monkeypatch, tmp_path):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.delenv(dispatch.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(availability, 'machine_reasons', lambda kind, index: ())
    monkeypatch.setattr(availability, 'triton_version', lambda: '3.6.0')
    caches = kernel_results.load_results, kernel_results.device_key, kernel_results._log_hint
    for cache in caches:
        cache.cache_clear()
    yield tmp_path
    for cache in caches:
        cache.cache_clear()


def store(**results):
    kernel_results.save_results('cpu', None, {f'aft_simple {k}': v for k, v in results.items()})


def test_kernels_are_used_only_after_a_stored_check(machine, caplog):
    with caplog.at_level(logging.WARNING, 'aft_mm.ops'):
        for _ in range(2):
            (reason,) = dispatch.unsupported_reasons('triton', *CALL)
    assert reason.startswith('not checked on this device; aft_mm doctor --kernels')
    assert len(caplog.records) == 1 and 'aft_mm doctor --kernels' in caplog.text
    store(float32=PASSED)
    assert not dispatch.unsupported_reasons('triton', *CALL)
    store(float32=Result('failed', 'a reason'))
    (reason,) = dispatch.unsupported_reasons('triton', *CALL)
    assert reason == 'failed on this device: a reason'
    store(float32=Result('passed', error=0.0, speeds=dict(training=[1.2, 0.7])))
    (reason,) = dispatch.unsupported_reasons('triton', *CALL)
    assert reason == '0.70 times as fast as eager on this device'


@pytest.mark.parametrize('change', ['sources', 'triton', 'TRITON_PTXAS_PATH'])
def test_another_version_or_source_needs_another_check(change, machine, monkeypatch):
    store(float32=PASSED)
    if change == 'sources':
        read = kernel_results.Path.read_bytes
        monkeypatch.setattr(
            kernel_results.Path,
            'read_bytes',
            lambda path: read(path) + b'#' * (path.name == 'geometry.py'),
        )
    elif change == 'triton':
        monkeypatch.setattr(availability, 'triton_version', lambda: '3.6.1')
    else:
        monkeypatch.setenv(change, '/opt/ptxas')
    kernel_results.device_key.cache_clear()
    kernel_results.load_results.cache_clear()
    assert dispatch.unsupported_reasons('triton', *CALL)


def test_a_damaged_file_is_no_result_and_results_are_merged(machine):
    store(float32=PASSED)
    store(float16=PASSED)
    path = kernel_results.result_path('cpu', None)
    assert set(json.loads(path.read_text())['results']) == {
        'aft_simple float32',
        'aft_simple float16',
    }
    assert [x.name for x in path.parent.iterdir()] == [path.name]
    path.write_text('{')
    kernel_results.load_results.cache_clear()
    assert kernel_results.load_results('cpu', None) == {}


@pytest.mark.parametrize(
    'error, status',
    [
        (WrongResultError('is wrong'), 'failed'),
        (RuntimeError('CUDA error: an illegal memory access was encountered'), 'failed'),
        (RuntimeError('Triton Error [CUDA]: out of memory'), 'unchecked'),
        (torch.OutOfMemoryError('CUDA out of memory'), 'unchecked'),
        (RuntimeError('Failed to find C compiler'), 'unchecked'),
        (OSError(28, 'No space left on device'), 'unchecked'),
    ],
)
def test_only_wrong_numbers_and_device_faults_are_failures(error, status):
    result = selftest.classify(error)
    assert result.status == status and str(error) in result.reason


@pytest.mark.parametrize(
    'code, statuses',
    [
        ('import os, signal; os.kill(os.getpid(), signal.SIGSEGV)', ['failed', 'failed']),
        ('import os, signal; os.kill(os.getpid(), signal.SIGTERM)', ['unchecked', 'unchecked']),
        ('raise OSError("no gcc")', ['unchecked', 'unchecked']),
        ('print(\'{"status": "failed", "reason": "off"}\')', ['failed', 'failed']),
        (
            'import time; print(\'{"status": "passed"}\', flush=True); time.sleep(60)',
            ['passed', 'unchecked'],
        ),
    ],
)
def test_a_crash_is_a_failure_and_a_signal_from_outside_is_not(code, statuses, monkeypatch):
    run, started = selftest.subprocess.run, []

    def stub(command, **options):
        started.append(command)
        return run([sys.executable, '-c', code], **options)

    monkeypatch.setattr(selftest.subprocess, 'run', stub)
    monkeypatch.setattr(selftest, 'TIME_LIMIT', 5)
    results = selftest.check_op('aft_simple', 'cpu', ['float32', 'float16'])
    assert [result.status for result in results.values()] == statuses
    assert len(started) == 2 - ('passed' in statuses)


def test_wrong_values_gradients_and_varying_results_are_found(monkeypatch):
    case = Case('', 'aft_simple', 9, dict(causal=True))
    monkeypatch.setattr(dispatch, 'backend_module', lambda name: eager)
    monkeypatch.setattr(dispatch, '_modules', {'triton': eager, 'reference': reference})
    monkeypatch.setattr(dispatch, '_logged', set())
    monkeypatch.setattr(availability, 'machine_reasons', lambda kind, index: ())
    check = selftest.check_case, 'aft_simple', case, 'masked', CPU, torch.float32, 1
    assert check[0](*check[1:]) < 2e-5
    right, noise = eager.aft_simple, torch.Generator().manual_seed(0)

    def doubled_gradient(query, key, value, **options):
        return right(query, 2 * key - key.detach(), value, **options)

    def noisy(*tensors, **options):
        return right(*tensors, **options) + 1e-6 * torch.rand(1, generator=noise)

    for wrong, message in [
        (lambda *tensors, **options: 1.001 * right(*tensors, **options), 'output of .* has error'),
        (doubled_gradient, 'grad_key of .* has error'),
        (noisy, 'differs between runs'),
    ]:
        monkeypatch.setattr(eager, 'aft_simple', wrong)
        with pytest.raises(WrongResultError, match=message):
            check[0](*check[1:])


def test_errors_of_cancelling_gradients_are_relative_to_their_sums(monkeypatch):
    """If one key has all the weight, grad_key is a difference of sums over 400 targets."""
    case = Case('', 'aft_simple', 400, dict(causal=False))
    errors = dict(output=0.0, grad_key=0.0)

    def run(op, case, twist, device, dtype, processors):
        tensors = selftest.twisted_inputs(case, twist, device, dtype)
        plain, output, grad_query, grad_key, *others = selftest._expected_of_op(
            case, tensors, 1, None
        )
        changed = output + errors['output'], grad_query, grad_key + errors['grad_key']
        return [plain, *changed, *others]

    monkeypatch.setattr(selftest, 'run_kernels', run)
    check = selftest.check_case, 'aft_simple', case, 'spike', CPU, torch.bfloat16, 1
    errors['grad_key'] = 0.02 * 19  # of sqrt(400) = 20
    assert 0.018 < check[0](*check[1:]) < 0.02
    for name, size in (('grad_key', 0.02 * 21), ('output', 0.2)):
        errors.update({'output': 0.0, 'grad_key': 0.0, name: size})
        with pytest.raises(WrongResultError, match=f'{name}.* has error'):
            check[0](*check[1:])


def test_a_case_too_large_for_the_oracle_is_compared_with_eager_in_float64(monkeypatch):
    case = Case('', 'aft_simple', 9, dict(causal=True))
    tensors = selftest.twisted_inputs(case, 'plain', CPU, torch.bfloat16)
    monkeypatch.setattr(dispatch, '_logged', set())
    expected = selftest._expected_of_op(case, tensors, 1, None)
    monkeypatch.setattr(selftest, 'LARGEST_PRODUCT', 0)
    monkeypatch.setattr(reference, 'aft_simple', None)
    found = selftest._expected_of_op(case, tensors, 1, None)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_a_result_is_valid_for_one_driver(machine, monkeypatch):
    def answer(version):
        version._obj.value = 13000

    libraries = {'libcuda.so.1': SimpleNamespace(cuDriverGetVersion=answer)}
    monkeypatch.setattr(kernel_results.ctypes, 'CDLL', libraries.__getitem__)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda index: f'GPU {index}')
    key = kernel_results.device_key('cuda', 1)
    assert key['driver'] == '13000' and key['device'] == 'GPU 1'


def test_an_interrupted_check_does_not_replace_a_result(machine):
    store(float32=PASSED)
    interrupted = Result('unchecked', 'ended by signal 15')
    store(float32=interrupted, float16=interrupted)
    assert kernel_results.load_results('cpu', None) == {
        'aft_simple float32': PASSED,
        'aft_simple float16': interrupted,
    }


def test_a_compiled_graph_is_compared_with_inductor(machine, monkeypatch):
    """Kernels that are faster than eager may be slower than what Inductor fuses."""
    speeds = {'inference': [1.5, 2.0], 'inference' + kernel_results.COMPILED: [0.9, 1.1]}
    store(float32=Result('passed', error=0.0, speeds=speeds))
    assert not dispatch.unsupported_reasons('triton', *CALL)
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, 'is_compiling', lambda: True)
        (reason,) = dispatch.unsupported_reasons('triton', *CALL)
        assert reason == '0.90 times as fast as compiled eager on this device'
    times = {'triton': 2.0, 'eager': 3.0}
    monkeypatch.setattr(
        selftest, 'device_seconds', lambda call: times[os.environ[dispatch.ENVIRONMENT_VARIABLE]]
    )
    monkeypatch.setattr(selftest, '_timed_calls', lambda *call: dict(inference=call[-1]))
    found = selftest.measure_speeds('aft_simple', CPU, torch.float32)
    assert found == dict.fromkeys(speeds, [1.5, 1.5])
    assert set(selftest.measure_speeds('aft_simple_step', CPU, torch.float32)) == {'inference'}


@pytest.mark.parametrize('lacks', ['compiler', 'header'])
def test_what_triton_needs_to_compile_is_named(lacks, machine, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    if lacks == 'compiler':
        monkeypatch.setenv('CC', 'no-such-compiler')
    else:
        monkeypatch.setattr(availability.shutil, 'which', lambda name: name)
        monkeypatch.setattr(availability.sysconfig, 'get_paths', lambda: dict(include=tmp_path))
    with pytest.raises(
        RuntimeError, match='no-such-compiler' if lacks == 'compiler' else 'Python.h'
    ):
        selftest.check_kernels(device='cuda')


def test_every_kernel_has_cases_to_time():
    timed = {op.removesuffix('_step') for op in availability.KERNELS}
    assert timed == set(selftest.TIMED_CASES)


def test_nothing_to_check_is_a_one_line_error(machine, monkeypatch):
    monkeypatch.setattr(availability, 'machine_reasons', lambda kind, index: ('is missing',))
    with pytest.raises(SystemExit, match='^Error: the kernels cannot be checked on cpu: triton is'):
        program.main(['--verify', '--device', 'cpu'])
    with pytest.raises(SystemExit):
        program.main(['--op', 'aft_simple'])


@pytest.mark.skipif(importlib.util.find_spec('triton') is None, reason='Triton is not installed')
def test_the_check_in_the_interpreter(tmp_path):
    environment = {**os.environ, 'TRITON_INTERPRET': '1', 'XDG_CACHE_HOME': str(tmp_path)}
    code = (
        'import runpy; runpy.run_module("aft_mm.ops", run_name="__main__"); '
        'from aft_mm.ops import dispatch; import torch; x = torch.zeros(1, 1, 1); '
        'print(dispatch.choose_backend("aft_simple_step", [x] * 4, dict(key_function="softmax")))'
    )
    command = [sys.executable, '-c', code, '--verify', '--op', 'aft_simple_step']
    command += ['--dtype', 'float32']
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count('float32: passed, largest error') == 1
    assert done.stdout.splitlines()[-1] == 'triton', done.stderr
