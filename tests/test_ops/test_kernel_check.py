"""`aft_mm doctor --kernels`: right, wrong and failing kernels, and their times."""

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from aft_mm.cli.main import main
from aft_mm.ops import dispatch, eager, kernel_check, reference
from aft_mm.ops.cases import TIMED_CASES, conv, simple
from aft_mm.ops.triton import availability

CPU = torch.device('cpu')


@pytest.fixture
def kernels(monkeypatch):
    """Torch operations in place of the kernels."""
    monkeypatch.setattr(dispatch, '_modules', dict(triton=eager, eager=eager, reference=reference))
    monkeypatch.setattr(dispatch, '_logged', set())
    monkeypatch.setattr(availability, 'machine_reasons', lambda kind, index: ())


@pytest.mark.parametrize('op', ['aft_simple', 'aft_local', 'aft_conv_step'])
def test_right_kernels(op, kernels, capsys):
    assert kernel_check.check_kernels([op], 'cpu')
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(',')[0] for line in lines if line.startswith('triton')] == [
        f'triton {op} {dtype}: right' for dtype in ('bfloat16', 'float16', 'float32')
    ]


def test_wrong_values_gradients_and_varying_results_are_found(kernels, monkeypatch, capsys):
    right, noise = eager.aft_simple, torch.Generator().manual_seed(0)

    def doubled_gradient(query, key, value, **options):
        return right(query, 2 * key - key.detach(), value, **options)

    def noisy(*tensors, **options):
        return right(*tensors, **options) + 1e-6 * torch.rand(1, generator=noise)

    def unwritten(*tensors, **options):
        result = right(*tensors, **options)
        return result + torch.empty_like(result)

    def fault(*tensors, **options):
        raise RuntimeError('CUDA error: an illegal memory access was encountered')

    for function, message in [
        (
            lambda *tensors, **options: 1.001 * right(*tensors, **options),
            'float32: wrong by 1.0e-03 > 2e-05',
        ),
        (doubled_gradient, ': grad_key, simple-'),
        (noisy, 'wrong by inf'),
        (unwritten, 'wrong by inf'),
        (fault, 'failed: RuntimeError: CUDA error: an illegal memory access'),
    ]:
        monkeypatch.setattr(eager, 'aft_simple', function)
        with pytest.raises(SystemExit, match='1'):
            kernel_check_of('aft_simple', monkeypatch)
        assert message in capsys.readouterr().out.splitlines()[-1]


def kernel_check_of(op, monkeypatch):
    monkeypatch.setenv('TRITON_INTERPRET', '1')  # on a CPU
    main(['doctor', '--kernels', op])


@pytest.mark.parametrize('scale, is_right', [(0.9, True), (1.1, False)])
def test_errors_of_cancelling_gradients_are_relative_to_their_sums(
    scale, is_right, kernels, monkeypatch
):
    """If one key has all the weight, grad_key is a difference of sums over 400 targets."""
    case, run_op, runs = simple(400), kernel_check.run_op, []

    def shifted(*arguments):
        results = run_op(*arguments)
        runs.append(1)
        if len(runs) > 1:  # not the oracle
            results[3] = results[3] + scale * 0.02 * 20
        return results

    monkeypatch.setattr(kernel_check, 'run_op', shifted)
    monkeypatch.setitem(availability.KERNELS, 'aft_simple', {})
    error, where = kernel_check.check_case('aft_simple', case, 'spike', CPU, torch.bfloat16)
    assert where.startswith('grad_key') and (error < 0.02) == is_right


@pytest.mark.parametrize('op', ['aft_conv', 'aft_conv_step'])
def test_times(op, kernels, monkeypatch):
    small = conv((3, 4), (3, 3), heads=64, channels=64)
    monkeypatch.setitem(TIMED_CASES, 'aft_conv', [small])
    timed = []

    def do_bench(call, return_mode):
        call()
        timed.append(os.environ[dispatch.ENVIRONMENT_VARIABLE])
        return {'triton': 0.25, 'eager': 0.5}[timed[-1]]

    testing = SimpleNamespace(do_bench=do_bench)
    monkeypatch.setattr(kernel_check.importlib, 'import_module', lambda name: testing)
    text = kernel_check.describe_times(op, CPU, torch.bfloat16)
    if op == 'aft_conv':
        assert text == '250, 250 µs; 2.00, 2.00 x eager; 2.00, 2.00 x flash attention'
    else:
        assert text == '250 µs; 2.00 x eager'


def test_every_kernel_has_cases_to_time():
    assert {op.removesuffix('_step') for op in availability.KERNELS} == set(TIMED_CASES)
    assert set(dispatch.KERNELS['cuda'].KERNELS) <= set(TIMED_CASES)


@pytest.mark.parametrize(
    'words, message',
    [
        ([], '^Error: the kernels cannot be checked on cuda: cuda .*; triton '),
        (['aft_linear'], '^Error: op must be one of aft_simple, '),
    ],
)
def test_nothing_to_check_is_a_one_line_error(words, message):
    if torch.cuda.is_available() and not words:
        pytest.skip('there is a GPU')
    with pytest.raises(SystemExit, match=message):
        main(['doctor', '--kernels', *words])


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec('triton') is None, reason='Triton is not installed')
def test_the_check_in_the_interpreter():
    environment = {**os.environ, 'TRITON_INTERPRET': '1'}
    code = 'from aft_mm.ops.kernel_check import check_kernels as check; '
    code += 'assert check(["aft_simple_step"], "cpu")'
    command = [sys.executable, '-W', 'ignore', '-c', code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(': right, largest error') == 3
