"""The check itself: what it is put through, that it sees what is wrong, and that it survives it.

Broken kernels run in the process of the check, where a `sitecustomize` of the test puts them, in
Triton's interpreter; every case of a device is run over eager in place of the kernels.
"""

import importlib.util
import time
from types import SimpleNamespace

import pytest
import torch

from aft_mm.ops import dispatch, eager, verify
from aft_mm.ops.__main__ import main
from aft_mm.ops.triton import support as triton_support
from aft_mm.ops.verify import cases, policy, process

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec('triton') is None, reason='Triton is not installed'
)
CPU = torch.device('cpu')
STEP = verify.Subject('aft_simple_step', 'float32', 'cpu', None)
# What takes the place of aft_simple_step in the process of a check, and what is said of it.
BROKEN = {
    'wrong': (
        'row, state = right(*parts, **options); return row * 1.01, state',
        'the rows of plain: T=18, D=12, key_function=softmax, causal=True, gate=sigmoid is off by',
    ),
    'raises': ('raise ArithmeticError("no such unit")', 'raised ArithmeticError: no such unit (pl'),
    'kills its process': ('os.kill(os.getpid(), 9)', 'ended by signal 9 (Killed) (plain: T=18'),
}
# What takes the place of aft_local_hard in this process.
WRONG = {
    'is not the same each time': lambda y: y + 1e-6 * torch.rand(()),
    'is off by nan': lambda y: y + 0 * torch.empty(1),  # reads what nobody wrote
    'the gradient of query of plain': lambda y: y.detach() + (y - y.detach()) * 1.01,
    'the output without gradients of plain': lambda y: y if y.requires_grad else y * 1.01,
    'of crowd': lambda y: torch.cat((y[:-1], y[:1])) if len(y) > cases.BATCH else y,
    'of masked': lambda y: torch.where(y == 0, 1, y),  # rows that see nothing
}


@pytest.fixture
def interpreter(monkeypatch, tmp_path):
    """Triton's interpreter as a device, and an empty cache folder."""
    monkeypatch.setenv('TRITON_INTERPRET', '1')
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.delenv('AFT_MM_BACKEND', raising=False)
    monkeypatch.delenv('AFT_MM_VERIFY', raising=False)
    monkeypatch.setattr(dispatch, 'INTERPRETED', True)
    monkeypatch.setattr(policy, '_settled', {})


def break_kernel(body, monkeypatch, tmp_path):
    """Every Python started from here on has another aft_simple_step."""
    (tmp_path / 'sitecustomize.py').write_text(
        'import os, time\n'
        'from aft_mm.ops.triton import library\n'
        'right = library.aft_simple_step\n'
        'def broken(*parts, **options):\n'
        f'    {body}\n'
        'library.aft_simple_step = broken\n'
    )
    monkeypatch.syspath_prepend(tmp_path)


def choose_for_step():
    x = torch.zeros(1, 1)
    return dispatch.choose_backend('aft_simple_step', [x] * 3, dict(key_function='softmax'))


@pytest.mark.parametrize('what', BROKEN)
def test_broken_kernels_end_in_eager_and_one_sentence(what, interpreter, monkeypatch, tmp_path):
    body, said = BROKEN[what]
    break_kernel(body, monkeypatch, tmp_path)
    with pytest.warns(UserWarning) as warned:
        assert choose_for_step() == choose_for_step() == 'eager'
    (warning,) = warned
    message = str(warning.message)
    assert message.startswith('eager serves aft_simple_step in float32 on cpu, because the Triton')
    assert said in message and '\n' not in message
    assert STEP.command in message
    assert not verify.find(STEP, 'no other').passed


def test_a_kernel_that_hangs_ends_in_eager_and_one_sentence(interpreter, monkeypatch, tmp_path):
    break_kernel('time.sleep(600)', monkeypatch, tmp_path)
    monkeypatch.setattr(process, 'TIME_LIMIT', 12)
    # On a slow machine it may not come as far as the kernel.
    with pytest.warns(UserWarning, match=r'did not end in 12 seconds( \(plain: T=18)?'):
        assert choose_for_step() == 'eager'


def test_what_fails_before_the_first_case_is_no_verdict(interpreter, monkeypatch):
    monkeypatch.setattr(process.sys, 'executable', '/bin/false')
    with pytest.warns(UserWarning, match='the check could not be made: exited with status 1'):
        assert choose_for_step() == 'eager'
    with pytest.raises(verify.NotCheckedError, match='no other'):
        verify.find(STEP, 'no other')


def test_right_kernels_pass_by_the_command_and_serve(interpreter, capsys):
    main(['--verify', '--op', STEP.op, '--dtype', 'float32', '--device', 'cpu'])
    row = capsys.readouterr().out
    assert row.startswith('aft_simple_step in float32 on cpu: passed, worst error ')
    assert choose_for_step() == 'triton'
    main([])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ['aft_simple_step', 'cpu', 'serves', 'no', 'available', 'no', 'no'] in rows
    assert ['aft_simple_step', 'cpu', 'passed', 'none', 'none'] in rows
    assert ['aft_simple', 'cpu', 'none', 'none', 'none'] in rows


def test_the_table_shows_what_failed(interpreter, capsys):
    verify.verdicts.folder().mkdir(parents=True)
    verify.verdicts.save(STEP, verify.Verdict(passed=False, reason='the rows are off'))
    main([])
    output = capsys.readouterr().out
    rows = [line.split() for line in output.splitlines()]
    assert ['aft_simple_step', 'cpu', 'failed', 'none', 'none'] in rows
    assert 'aft_simple_step in float32 on cpu failed: the rows are off\n' in output
    assert 'on cpu: failed its check on this device: the rows are off\n' in output


CANNOT = {
    ('--verify', '--device', 'cuda'): 'Error: there is nothing to verify on cuda: triton ',
    ('--verify', '--device', 'meta'): 'Error: there is nothing to verify on meta: triton serves ',
    ('--op', 'aft_full'): '--op, --dtype and --device say what to --verify',
    ('--verify', '--op', 'aft'): "invalid choice: 'aft'",
}


@pytest.mark.parametrize('words', CANNOT)
def test_what_cannot_be_verified_is_one_sentence(words, capsys):
    if torch.cuda.is_available():
        pytest.skip('there is a device')
    with pytest.raises(SystemExit) as end:
        main(words)
    last = (str(end.value.code) + capsys.readouterr().err).splitlines()[-1]
    assert CANNOT[words] in last


def test_a_wrong_setting_is_one_sentence(monkeypatch):
    monkeypatch.setenv('AFT_MM_VERIFY', 'always')
    with pytest.raises(SystemExit, match="AFT_MM_VERIFY must be one of auto, off, never, got 'a"):
        main([])


@pytest.fixture
def over_eager(monkeypatch):
    """Eager in place of the kernels, with every option, and NaN in memory that nobody wrote."""
    from aft_mm.ops.verify import judge

    monkeypatch.setattr(judge, 'library', SimpleNamespace(**vars(eager)))
    monkeypatch.setattr(triton_support, 'reasons_against', lambda op, tensors, options: [])
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield judge
    torch.use_deterministic_algorithms(False)


# Those of AFT: linear attention has no kernel to be judged.
JUDGED = [op for op in (*dispatch.OPS, *dispatch.STEPS) if op.startswith('aft_')]


@pytest.mark.parametrize('op', JUDGED)
def test_the_cases_pass_over_eager(op, over_eager):
    """Cases, oracle and tolerances fit each other, for options without kernels, too."""
    dtype = torch.bfloat16 if op in ('aft_simple', 'aft_local_step') else torch.float32
    found = cases.cases(op, CPU, dtype, processors=1, interpreted=True)
    for case in found:
        over_eager.judge(op, case, CPU, dtype)
    # A device sees every form in these lengths, and every twist.
    device = cases.cases(op, CPU, dtype, processors=132, interpreted=False)
    assert {case.form.tokens for case in device} == {1, 63, 64, 65, 200}
    assert {case.twist for case in device} >= {case.twist for case in found}
    assert all(case.copies * cases.BATCH >= 16 * 132 for case in device if case.twist == 'crowd')


@pytest.mark.parametrize('op', JUDGED)
def test_what_is_timed_runs(op, over_eager, monkeypatch):
    family = op.removesuffix('_step')
    (first, *_) = cases.served_forms(op, CPU, torch.float32, cases.INTERPRETED)
    timed = cases.TIMED[family]
    assert (timed.op, set(timed.options)) == (family, set(first.options))
    # The sizes of a device would take a CPU minutes.
    monkeypatch.setattr(over_eager, 'TIMED', {family: first})
    monkeypatch.setattr(over_eager, 'TIMED_SEQUENCES', 3)
    monkeypatch.setattr(over_eager, 'TIMED_STEP_SEQUENCES', 3)
    monkeypatch.setattr(over_eager, 'TIMING', 0.01)

    def slow(function):
        return lambda *parts, **options: time.sleep(0.02) or function(*parts, **options)

    vars(over_eager.library).update({op: slow(getattr(eager, op))})
    assert 0 < over_eager.speed(op, CPU, torch.float32) < 0.7


@pytest.mark.parametrize('said', WRONG)
def test_what_is_wrong_is_seen(said, over_eager):
    def kernel(*parts, **options):
        return WRONG[said](eager.aft_local_hard(*parts, **options))

    over_eager.library.aft_local_hard = kernel
    with pytest.raises(over_eager.WrongResultError, match=said):
        for case in cases.cases('aft_local_hard', CPU, torch.float32, 1, interpreted=True):
            over_eager.judge('aft_local_hard', case, CPU, torch.float32)


@pytest.mark.cuda
@pytest.mark.parametrize('dtype', ['float32', 'float16', 'bfloat16'])
@pytest.mark.parametrize('op', triton_support.KERNELS)
def test_kernels_pass_on_this_device(op, dtype):
    if triton_support.machine_reasons('cuda', 0):
        pytest.skip('needs a CUDA device that the kernels serve')
    verdict = process.check(verify.Subject(op, dtype, 'cuda', 0))
    assert verdict.passed, verdict.reason
