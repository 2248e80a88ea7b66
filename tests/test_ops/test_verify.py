"""Verdicts before a kernel serves: what decides, who checks, and what a person is told.

Triton's interpreter stands for the device. What happens inside a check is `test_verify_judge.py`.
"""

import importlib
import importlib.util
import json
import multiprocessing
import os
import time
from types import SimpleNamespace

import pytest
import torch

from aft_mm import ops
from aft_mm.ops import dispatch, verify
from aft_mm.ops.verify import policy, process, verdicts

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec('triton') is None, reason='Triton is not installed'
)
SUBJECT = verify.Subject('aft_simple', 'float32', 'cpu', None)
PASSED = verify.Verdict(passed=True, error=1e-7, speed=1.5)
FAILED = verify.Verdict(passed=False, reason='the output is off by 4.2e-01')


@pytest.fixture(autouse=True)
def device(monkeypatch, tmp_path):
    """A device that this process meets for the first time, and an empty cache folder."""
    monkeypatch.setenv('TRITON_INTERPRET', '1')
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.delenv('AFT_MM_BACKEND', raising=False)
    monkeypatch.delenv('AFT_MM_VERIFY', raising=False)
    monkeypatch.setattr(dispatch, 'INTERPRETED', True)
    # As on a device, where no loop serves.
    monkeypatch.setattr(dispatch, 'DEFAULT_BACKENDS', ('triton', 'eager'))
    monkeypatch.setattr(policy, '_settled', {})


@pytest.fixture
def checks(monkeypatch):
    """The checks that were made; each finds what `checks.verdict` is."""
    made = SimpleNamespace(count=0, verdict=PASSED)

    def check(subject):
        made.count += 1
        return made.verdict

    monkeypatch.setattr(process, 'check', check)
    return made


def choose(**options):
    x = torch.zeros(1, 1, 1)
    return dispatch.choose_backend(
        'aft_simple', [x] * 3, dict(key_function='softmax', causal=True, **options)
    )


def choose_anew(monkeypatch):
    """As another process would."""
    monkeypatch.setattr(policy, '_settled', {})
    return choose()


def reasons():
    options = dict(key_function='softmax', causal=True)
    return dispatch.reasons_against('triton', 'aft_simple', [torch.zeros(1, 1, 1)] * 3, options)


def test_a_pass_serves_and_is_remembered(checks, monkeypatch):
    assert reasons() == ['has no verdict on this device: the first use makes it']
    assert [choose(), choose(), choose_anew(monkeypatch)] == ['triton'] * 3
    assert checks.count == 1 and reasons() == []
    # What has no kernel is not checked.
    assert choose(key_mask=None) == 'triton'
    x = torch.zeros(1, 1, 1)
    options = dict(key_function='relu', causal=False)
    assert dispatch.choose_backend('aft_simple', [x] * 3, options) == 'eager'
    assert dispatch.choose_backend('aft_simple', [x.double()] * 3, options) == 'eager'
    assert checks.count == 1


def test_each_type_has_a_verdict_of_its_own(checks):
    assert choose() == 'triton'
    checks.verdict = verify.Verdict(passed=True, error=0.0, speed=0.5)
    options = dict(key_function='softmax', causal=True)
    x = torch.zeros(1, 1, 1, dtype=torch.bfloat16)
    assert dispatch.choose_backend('aft_simple', [x] * 3, options) == 'eager'
    assert choose() == 'triton' and checks.count == 2


def test_what_is_slower_than_eager_does_not_serve(checks, recwarn):
    checks.verdict = verify.Verdict(passed=True, error=0.0, speed=0.72)
    assert choose() == 'eager' and not recwarn
    assert reasons() == ['has 0.72 × the speed of eager on this device']


def test_a_failure_falls_back_with_one_warning(checks, monkeypatch, recwarn):
    checks.verdict = FAILED
    assert [choose(), choose()] == ['eager'] * 2
    (warning,) = recwarn
    assert str(warning.message) == (
        'eager serves aft_simple in float32 on cpu, because the Triton kernel failed its check on '
        'this device: the output is off by 4.2e-01; to check it again: TRITON_INTERPRET=1 python '
        '-m aft_mm.ops --verify --op aft_simple --dtype float32 --device cpu'
    )
    assert choose_anew(monkeypatch) == 'eager' and checks.count == 1


def test_other_ranks_are_silent(checks, monkeypatch, recwarn):
    checks.verdict = FAILED
    for name, answer in dict(is_initialized=True, get_rank=1).items():
        monkeypatch.setattr(torch.distributed, name, lambda answer=answer: answer)
    assert choose() == 'eager' and not recwarn


def test_off_trusts_and_never_makes_none(checks, monkeypatch, recwarn):
    monkeypatch.setenv('AFT_MM_VERIFY', 'off')
    assert choose() == 'triton'
    monkeypatch.setenv('AFT_MM_VERIFY', 'never')
    assert choose_anew(monkeypatch) == 'eager'
    assert reasons() == ['has no verdict on this device: AFT_MM_VERIFY=never makes none']
    assert checks.count == 0 and not recwarn
    # A verdict that is there counts.
    verify.make(SUBJECT)
    assert choose_anew(monkeypatch) == 'triton'
    monkeypatch.setenv('AFT_MM_VERIFY', 'always')
    with pytest.raises(ValueError, match="AFT_MM_VERIFY must be one of .*never, got 'always'"):
        choose_anew(monkeypatch)


def test_kernels_asked_for_serve_without_a_verdict(checks, monkeypatch):
    monkeypatch.setenv('AFT_MM_BACKEND', 'triton')
    assert choose() == 'triton' and checks.count == 0
    monkeypatch.setenv('AFT_MM_BACKEND', 'eager')
    assert choose() == 'eager'


@pytest.mark.parametrize('changed', ['sources', 'torch', 'triton', 'ptxas', 'driver', 'device'])
def test_a_verdict_holds_for_what_it_was_made_with(changed, checks, monkeypatch):
    assert choose() == 'triton'
    key = verdicts.key_of(SUBJECT)
    monkeypatch.setattr(verdicts, 'key_of', lambda subject: {**key, changed: 'another'})
    monkeypatch.setenv('AFT_MM_VERIFY', 'never')
    assert choose_anew(monkeypatch) == 'eager'
    monkeypatch.setenv('AFT_MM_VERIFY', 'auto')
    checks.verdict = FAILED
    with pytest.warns(UserWarning, match='failed its check'):
        assert choose_anew(monkeypatch) == 'eager'
    assert checks.count == 2


def test_the_key_of_a_cuda_device(monkeypatch):
    verdicts.about_device.cache_clear()
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda index: f'GPU {index}')
    monkeypatch.setattr(verdicts.collect_env, 'get_nvidia_driver_version', lambda run: '580.1')
    key = verdicts.key_of(verify.Subject('aft_simple', 'float32', 'cuda', 1))
    verdicts.about_device.cache_clear()
    assert key.pop('ptxas').startswith('Build cuda_') and len(key.pop('sources')) == 64
    versions = dict(torch=torch.__version__, triton=importlib.import_module('triton').__version__)
    assert key == dict(op='aft_simple', dtype='float32', device='GPU 1', driver='580.1', **versions)


def test_the_sources_of_a_verdict_are_the_kernels_and_the_check(monkeypatch, tmp_path):
    for name in ('triton/a.py', 'verify/b.py', 'eager/c.py'):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text('1')
    monkeypatch.setattr(verdicts, 'PACKAGE', tmp_path)

    def changed(name):
        verdicts.source_hash.cache_clear()
        before = verdicts.source_hash()
        (tmp_path / name).write_text('2')
        verdicts.source_hash.cache_clear()
        return verdicts.source_hash() != before

    assert changed('triton/a.py') and changed('verify/b.py') and not changed('eager/c.py')
    monkeypatch.undo()
    verdicts.source_hash.cache_clear()


DAMAGE = {
    'half': '{"key": {"op": "aft_',
    'empty': '',
    'another': '[1, 2]',
    'no verdict': '{"verdict": 7}',
    'other key': '{"key": {}, "verdict": {"passed": true}}',
    'no bytes of text': '\xff\xfe',
}


@pytest.mark.parametrize('damage', DAMAGE)
def test_a_damaged_verdict_is_made_anew(damage, checks, monkeypatch):
    assert choose() == 'triton'
    path = verdicts.path_of(SUBJECT)
    path.write_bytes(DAMAGE[damage].encode('latin-1'))
    monkeypatch.setenv('AFT_MM_VERIFY', 'never')
    assert choose_anew(monkeypatch) == 'eager'
    assert 'has no verdict on this device: ' in reasons()[0] and '\n' not in reasons()[0]
    monkeypatch.setenv('AFT_MM_VERIFY', 'auto')
    checks.verdict = FAILED
    with pytest.warns(UserWarning, match='failed its check'):
        assert choose_anew(monkeypatch) == 'eager'
    assert json.loads(path.read_text())['verdict']['passed'] is False


@pytest.mark.parametrize('obstacle', ['a file', 'no permission', 'a full disk'])
def test_where_no_verdict_can_be_kept_eager_serves(obstacle, checks, monkeypatch, tmp_path):
    if obstacle == 'a file':
        (tmp_path / 'aft_mm').write_text('')
    elif obstacle == 'no permission':
        tmp_path.chmod(0o555)
        if os.access(tmp_path, os.W_OK):
            pytest.skip('permissions do not bind this user')
    else:
        (tmp_path / 'aft_mm/verdicts').mkdir(parents=True)

        def full(*paths):
            raise OSError(28, 'No space left on device')

        monkeypatch.setattr(os, 'replace', full)
    with pytest.warns(UserWarning) as warned:
        assert choose() == choose() == 'eager'
    (warning,) = warned
    message = str(warning.message)
    assert f'{tmp_path}/aft_mm/verdicts cannot keep a verdict (' in message
    assert 'XDG_CACHE_HOME' in message and '\n' not in message
    assert not list(tmp_path.rglob('*.tmp'))


def test_a_folder_that_cannot_be_written_still_tells(checks, monkeypatch):
    verify.make(SUBJECT)
    monkeypatch.setattr(process, 'make', None)
    assert choose() == 'triton'


def in_processes(count, target):
    """Processes that inherit everything of this one, locks aside."""
    context = multiprocessing.get_context('fork')
    started = [context.Process(target=target) for _ in range(count)]
    for each in started:
        each.start()
    return started


def test_one_of_several_processes_checks(monkeypatch, tmp_path):
    def check(subject):
        with open(tmp_path / 'checks', 'a') as file:
            file.write('one\n')
        time.sleep(1)
        return PASSED

    def target():
        os._exit(0 if choose() == 'triton' else 1)

    monkeypatch.setattr(process, 'check', check)
    started = in_processes(3, target)
    for each in started:
        each.join(60)
    assert [each.exitcode for each in started] == [0, 0, 0]
    assert (tmp_path / 'checks').read_text() == 'one\n'


def test_a_process_that_holds_the_lock_is_not_waited_for_for_ever(checks, monkeypatch, tmp_path):
    def hold():
        with process._alone(SUBJECT):
            (tmp_path / 'held').touch()
            time.sleep(600)

    (holder,) = in_processes(1, hold)
    while not (tmp_path / 'held').exists():
        time.sleep(0.02)
    with monkeypatch.context() as patch:
        patch.setattr(process, 'TIME_LIMIT', 0)
        patch.setattr(process, 'MARGIN', 0.2)
        with pytest.warns(UserWarning, match='another process has not ended its check in 0.2 sec'):
            assert choose() == 'eager'
    holder.kill()
    holder.join()
    assert choose_anew(monkeypatch) == 'triton' and checks.count == 1


def compiled():
    torch._dynamo.reset()
    function = torch.compile(ops.aft_simple, fullgraph=True, backend='aot_eager')
    return function(*(torch.randn(1, 4, 2) for _ in range(3)), causal=True)


def test_a_graph_takes_a_verdict_but_makes_none(checks, monkeypatch):
    def kernel(query, key, value, **options):
        return torch.full_like(value, 7.0)

    monkeypatch.setitem(dispatch._MODULES, 'triton', SimpleNamespace(aft_simple=kernel))
    with pytest.warns(UserWarning, match='none is made while a graph is compiled or captured'):
        assert (compiled() != 7).all()
    assert checks.count == 0
    # The first call outside makes it, and the next graph has it.
    assert choose() == 'triton' and checks.count == 1
    assert (compiled() == 7).all()


def test_a_capture_makes_no_verdict(checks, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: True)
    monkeypatch.setattr(verdicts, 'key_of', lambda subject: {'op': subject.op})
    about = 'aft_simple', torch.float32, 'cuda', 0
    with pytest.warns(UserWarning, match='compiled or captured; to check it again: python -m aft'):
        assert policy.reason_against(*about, check=True, tracing=False) is not None
    assert checks.count == 0
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: False)
    assert policy.reason_against(*about, check=True, tracing=False) is None and checks.count == 1


def test_exported_graphs_repeat_the_decisions_of_eager(checks):
    with ops.record_paths() as decisions:
        assert choose() == 'eager'
    with ops.replay_paths(decisions):
        assert choose() == 'eager'
    assert choose() == 'triton'


def test_what_serves_is_logged_once(checks, monkeypatch, caplog):
    monkeypatch.setattr(dispatch, '_served', set())
    monkeypatch.setattr(dispatch, 'INTERPRETED', False)
    caplog.set_level('INFO', 'aft_mm.ops')
    x = torch.zeros(1, 3, 2)
    for dtype in (torch.float32, torch.float32, torch.bfloat16):
        ops.aft_simple(*[x.to(dtype)] * 3)
    assert caplog.messages == [
        'eager serves aft_simple in float32', 'eager serves aft_simple in bfloat16'
    ]  # fmt: skip
