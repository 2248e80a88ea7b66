"""Runs ended by a signal, a full disk, a dead process or the network."""

import errno
import multiprocessing
import os
import re
import resource
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from aft_mm.engine import StopSignals, run_guard

from ..helpers import free_port

pytestmark = pytest.mark.adversarial


@HOOKS.register_module(force=True)
class FailHook(Hook):
    """Call ``action`` of its class after iteration ``after``, counted from 1."""

    action = staticmethod(lambda runner: None)
    priority = 'HIGHEST'

    def __init__(self, after=8):
        self.after = after

    def after_train_iter(self, runner, **kwargs):
        if runner.iter + 1 == self.after:
            FailHook.action(runner)


@pytest.fixture
def train(tool, config, here, monkeypatch):

    def call(action=None, *words, resume=False, workers=0):
        monkeypatch.setattr(FailHook, 'action', staticmethod(action or (lambda runner: None)))
        Path('config.py').write_text(
            f'_base_ = {config("tiny_without_chance")!r}\n'
            'custom_hooks = [dict(type="FailHook")]\n'
            f'train_dataloader = dict(num_workers={workers})\n'
            f'experiment_name = "run-{time.monotonic_ns()}"\n'
        )
        tool('train').main(
            ['config.py', '--work-dir', 'work', *(['--resume'] if resume else []), *words]
        )

    return call


def ends(call, *args, **kwargs):
    with pytest.raises(SystemExit) as end:
        call(*args, **kwargs)
    return end.value.code


def send(signum):
    return lambda runner: os.kill(os.getpid(), signum)


def weights(path='work/epoch_3.pth'):
    return torch.load(path, weights_only=True)['state_dict']


RESUME = 'to resume, run: python tools/train.py config.py --work-dir work --resume'


@pytest.fixture
def hangup():
    """Set the action at SIGHUP until the end of the test: it is ignored under nohup."""
    before = signal.getsignal(signal.SIGHUP)
    yield lambda action: signal.signal(signal.SIGHUP, action)
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize('signum', [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_ends_with_a_checkpoint_from_which_the_run_goes_on(train, signum, hangup, capfd):
    hangup(signal.SIG_DFL)
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    assert ends(train, send(signum)) == 128 + signum
    checkpoint = Path('work/iter_8.pth').resolve()
    said = f'{signum.name} stopped the run after iteration 8; the checkpoint is {checkpoint}'
    assert capfd.readouterr().err.splitlines()[-1] == f'{said}; {RESUME}'
    assert handlers == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    assert torch.load(checkpoint, weights_only=True)['meta']['iter'] == 8
    if signum == signal.SIGTERM:
        train(resume=True)
        resumed = weights()
        os.rename('work', 'first')
        train()
        assert all(torch.equal(value, resumed[key]) for key, value in weights().items())


def test_nohup_keeps_its_meaning(hangup):
    hangup(signal.SIG_IGN)
    with StopSignals():
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL


def test_the_users_handler_of_sigusr1_stays():
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    mine = signal.getsignal(signal.SIGUSR1)
    with StopSignals():
        assert signal.getsignal(signal.SIGUSR1) is mine
    signal.signal(signal.SIGUSR1, before)


def test_few_open_files_do_not_hang(run, root, config, tmp_path):
    """A batch of two workers has more tensors than the process may have open files."""
    (tmp_path / 'script.py').write_text(
        'import resource, runpy, sys\n'
        'resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))\n'
        'sys.argv = sys.argv[1:]\n'
        'runpy.run_path(sys.argv[0], run_name="__main__")\n'
    )
    words = 'script.py', root / 'tools/train.py', config('tiny_without_chance'), '--work-dir', '.'
    options = ['num_workers=2', 'batch_size=48', 'dataset.indices=192']
    options = 'train_cfg.max_epochs=1', *(f'train_dataloader.{option}' for option in options)
    done = run(*words, '--cfg-options', *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert Path(tmp_path, 'epoch_1.pth').exists()


@pytest.mark.parametrize(
    'begun, command',
    [
        ('tools/train.py c.py --resume a.pth --amp', 'python tools/train.py c.py --amp --resume'),
        (
            "/venv/bin/aft_mm c.py --cfg-options 'a=b c' --resume",
            "aft_mm train c.py --cfg-options 'a=b c' --resume",
        ),
        ('/a/aft_mm/__main__.py --resume=a.pth c.py', 'python -m aft_mm train c.py --resume'),
    ],
)
def test_the_command_that_goes_on_is_the_one_that_began(begun, command, monkeypatch):
    program, *words = shlex.split(begun)
    monkeypatch.setattr('sys.argv', [program])
    with run_guard(words) as run:
        assert run.command() == f'run: {command}'


def test_a_process_that_is_forked_inside_ends_as_any_other():
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # so that the signal is there before the process begins
    try:
        with StopSignals():
            context = multiprocessing.get_context('fork')
            lock = context.Semaphore(0)
            processes = [context.Process(target=lock.acquire) for _ in range(20)]
            for process in processes:
                process.start()
                process.terminate()  # as a pool of an evaluation does, before it waits
            ended = []
            for process in processes:
                process.join(30)
                ended.append(process.exitcode)
                process.kill()
            asked = context.Process(
                target=lambda: os._exit(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
            )
            asked.start()
            asked.join()
    finally:
        os.sched_setaffinity(0, cores)
    assert ended == [-signal.SIGTERM] * len(processes)
    assert asked.exitcode == 1  # by the system


def kill_worker(runner):
    # The newest: other tests may have left processes of their own.
    os.kill(max(process.pid for process in multiprocessing.active_children()), signal.SIGKILL)


def lose_connection(runner):
    """Simulate a worker that dies while it sends: torch knows the reason after SIGCHLD."""

    def die(signum, frame):
        signal.signal(signal.SIGALRM, before)
        raise RuntimeError('DataLoader worker (pid 7) is killed by signal: Killed. ')

    before = signal.signal(signal.SIGALRM, die)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    raise ConnectionResetError(errno.ECONNRESET, 'Connection reset by peer')


@pytest.mark.parametrize('action', [kill_worker, lose_connection])
def test_a_worker_that_is_killed_is_said(train, action):
    sentence = ends(train, action, workers=1)
    assert sentence.startswith('Error: worker ') and 'of a data loader' in sentence
    assert f'the last checkpoint is {Path("work/epoch_1.pth").resolve()}; to resume' in sentence


def test_a_full_disk_leaves_the_checkpoint_before_and_nothing_half_written(train):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(runner):
        size = os.path.getsize('work/epoch_1.pth')
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, before[1]))

    try:
        sentence = ends(train, fill, '--cfg-options', 'default_hooks.checkpoint.save_best=None')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert 'epoch_2.pth' in sentence and 'File too large' in sentence
    assert f'the last checkpoint is {Path("work/epoch_1.pth").resolve()}; to resume' in sentence
    assert sorted(path.name for path in Path('work').glob('*epoch*')) == ['epoch_1.pth']
    assert Path('work/last_checkpoint').read_text().endswith('epoch_1.pth')
    train(resume=True)
    assert Path('work/epoch_3.pth').exists()


def test_a_folder_that_is_gone_is_said(train):
    sentence = ends(train, lambda runner: os.rename('work', 'moved'))
    assert 'cannot be written' in sentence and '\n' not in sentence
    assert 'the last checkpoint is' in sentence


def alive(pid):
    try:
        os.kill(pid, 0)
        return 'Z' not in Path(f'/proc/{pid}/stat').read_text().split(')')[1].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False


WORKER = """
import os, sys, time
from mmengine.config import Config
from aft_mm.engine.runner import start_distributed
os.environ.update(RANK='0', WORLD_SIZE='1', LOCAL_RANK='0', MASTER_PORT=sys.argv[1])
start_distributed(Config(dict(launcher='pytorch')))
print('ready', os.getpid(), flush=True)
time.sleep(300)
"""


def test_processes_whose_launcher_was_killed_end(tmp_path):
    (tmp_path / 'worker.py').write_text(WORKER)
    (tmp_path / 'launcher.py').write_text(
        'import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])'
    )
    launcher = subprocess.Popen(
        [sys.executable, tmp_path / 'launcher.py', tmp_path / 'worker.py', str(free_port())],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    pid = int(launcher.stdout.readline().split()[1])
    launcher.kill()
    launcher.wait()
    end = time.monotonic() + 60
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert not alive(pid)


class TestLauncher:
    def ends(self, tool, monkeypatch, words, **variables):
        for name in ('NNODES', 'NODE_RANK', 'MASTER_ADDR', 'RDZV_TIMEOUT'):
            monkeypatch.delenv(name, raising=False)
        for name, value in {'PORT': free_port(), **variables}.items():
            monkeypatch.setenv(name, str(value))
        return ends(tool('launch').main, words)

    @pytest.mark.parametrize(
        ('variables', 'sentence'),
        [
            (dict(NNODES='two'), "NNODES must be a number of at least 1, got 'two'"),
            (dict(NODE_RANK=2, NNODES=2), 'NODE_RANK must be 0 to 1 with NNODES=2, got 2'),
            (dict(PORT=0), "PORT must be a number of at least 1, got '0'"),
            (dict(PORT=99999), 'PORT=99999 cannot be used on this machine'),
        ],
    )
    def test_what_no_number_can_be(self, tool, monkeypatch, variables, sentence):
        assert sentence in self.ends(tool, monkeypatch, ['train', 'a.py', '1'], **variables)

    def test_a_taken_port(self, tool, monkeypatch):
        with socket.socket() as taken:
            taken.bind(('', 0))
            taken.listen(1)
            port = taken.getsockname()[1]
            assert f'PORT={port} is taken by another run on this machine; set PORT' in self.ends(
                tool, monkeypatch, ['train', 'a.py', '1'], PORT=port
            )

    @pytest.mark.parametrize('rank', [0, 1])
    def test_machines_that_do_not_come(self, tool, monkeypatch, capfd, rank):
        sentence = self.ends(
            tool, monkeypatch, ['train', 'a.py', '1'], NNODES=2, NODE_RANK=rank, RDZV_TIMEOUT=1
        )
        assert sentence.startswith('Error: the machines did not meet (')
        assert f'machine {rank} of 2 waits up to 1 s for the others' in capfd.readouterr().err

    def test_an_error_of_the_processes_ends_in_one_line(self, run, root, config, tmp_path):
        words = '2 --work-dir work --cfg-options train_cfg.max_epochs=0'.split()
        result = run(root / 'tools/launch.py', 'train', config('tiny'), *words, cwd=tmp_path)
        *others, last = result.stderr.splitlines()
        reason = 'train_cfg.max_epochs must be an int, 1 or larger, got 0'
        assert re.fullmatch(rf'Error: process \d \(pid \d+\): {reason}', last)
        assert all(line == f'Error: {reason}' or line.startswith('SIGTERM ') for line in others)

    def test_the_arguments_of_a_test(self, tool, monkeypatch):
        monkeypatch.setenv('PORT', str(free_port()))
        launch = tool('launch')
        words = launch.parse_args(['test', 'a.py', 'a.pth', '2', '--out', 'a.json'])
        *options, script, config, checkpoint, flag, launcher, out, path = launch.torchrun_words(
            words
        )
        assert '--nproc_per_node=2' in options and Path(script).parts[-2:] == ('tools', 'test.py')
        assert [config, checkpoint, flag, launcher] == ['a.py', 'a.pth', '--launcher', 'pytorch']
        assert [out, path] == ['--out', 'a.json']

    @pytest.mark.parametrize('words', [[], ['train'], ['test', 'a.py', '2']])
    def test_missing_words_are_named(self, tool, words, capsys):
        assert ends(tool('launch').main, words) == 2
        assert 'the following arguments are required' in capsys.readouterr().err
