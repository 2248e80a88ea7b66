"""Start and end of a group of processes on a CPU."""

import contextlib
import json
import socket

import pytest
import torch
import torch.distributed as dist
from mmengine.config import Config
from torch import nn

from aft_mm.engine.runner import (
    _check_same_run,
    _port_of_job,
    fix_sum_order,
    start_distributed,
)

from ..errors import refuses_input

SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
from mmengine.config import Config
from aft_mm.engine.runner import start_distributed

# Groups of two processes, which end as any other does.
processes = []
for port in map(int, sys.argv[2:]):
    for rank in '01':
        processes.append(os.fork())
        if not processes[-1]:
            os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE='2', MASTER_PORT=str(port))
            break
    if not processes[-1]:
        break
if processes and processes[-1]:
    sys.exit(sum(os.waitpid(process, 0)[1] for process in processes) > 0)

cfg = Config(dict(launcher=sys.argv[1]))
start_distributed(cfg)
rank = dist.get_rank()
everyone = [None] * dist.get_world_size()
dist.all_gather_object(everyone, rank)
# What a gloo thread may still hold when the interpreter ends.
for _ in range(20):
    tensor = torch.full((1000, ), float(rank))
    dist.broadcast(tensor, src=0)
if rank == 0:
    print(json.dumps(dict(everyone=everyone, backend=dist.get_backend(),
                          local_rank=os.environ['LOCAL_RANK'],
                          wrapper=cfg.model_wrapper_cfg.to_dict())))
"""

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason='mmengine starts NCCL itself'),
    pytest.mark.slow,
]


@pytest.fixture
def script(tmp_path):
    path = tmp_path / 'script.py'
    path.write_text(SCRIPT)
    return path


def launch(run, script, launcher, env):
    result = run(script, launcher, cwd=script.parent, env={'CUDA_VISIBLE_DEVICES': '', **env})
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_two_processes_meet_and_never_abort_at_exit(run, script):
    # Without the rest before the exit about half of the groups abort.
    ports = []
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            free = stack.enter_context(socket.socket())
            free.bind(('127.0.0.1', 0))
            ports.append(free.getsockname()[1])
    result = run(script, 'pytorch', *ports, cwd=script.parent, fresh=True)
    assert result.returncode == 0, result.stderr
    groups = [json.loads(line)['everyone'] for line in result.stdout.splitlines()]
    assert groups == [[0, 1]] * 2


def test_slurm_asks_scontrol_for_the_first_host_unless_told(run, script):
    scontrol = script.parent / 'scontrol'
    scontrol.write_text('#!/bin/sh\necho localhost\necho elsewhere\n')
    scontrol.chmod(0o755)
    asked = dict(SLURM_NODELIST='localhost,elsewhere', PATH=f'{script.parent}:/usr/bin:/bin')
    for place in (dict(MASTER_ADDR='127.0.0.1'), asked):
        place |= dict(SLURM_PROCID='0', SLURM_NTASKS='1', SLURM_LOCALID='0')
        said = launch(run, script, 'slurm', place)
        assert said['everyone'] == [0] and said['backend'] == 'gloo'


def refused(run, script, launcher, env):
    result = run(script, launcher, cwd=script.parent, env={'CUDA_VISIBLE_DEVICES': '', **env})
    assert result.returncode == 1
    return result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        ('echo no such node >&2; exit 1', 'got no such node'),
        ('', 'got no host'),
        (None, 'got No such file or directory'),
    ],
)
def test_a_failing_scontrol_is_named(run, script, content, message):
    if content is not None:
        (script.parent / 'scontrol').write_text(f'#!/bin/sh\n{content}\n')
        (script.parent / 'scontrol').chmod(0o755)
    task = dict(SLURM_PROCID='0', SLURM_NTASKS='1', SLURM_LOCALID='0')
    task |= dict(SLURM_NODELIST='n[1-2]', PATH=str(script.parent))
    if content is not None:
        task['PATH'] += ':/usr/bin:/bin'
    line = refused(run, script, 'slurm', task)
    expected = "UserError: scontrol must give the hosts of SLURM_NODELIST='n[1-2]', "
    assert expected in line and f'{message}; or set MASTER_ADDR to the first host' in line


def test_a_port_that_is_taken_is_named(run, script):
    task = dict(SLURM_PROCID='0', SLURM_NTASKS='1', SLURM_LOCALID='0', MASTER_ADDR='127.0.0.1')
    with socket.socket() as taken:
        taken.bind(('127.0.0.1', 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = refused(run, script, 'slurm', dict(task, MASTER_PORT=port))
    assert f'must be a free port of the first machine, got 127.0.0.1:{port}, which is taken' in line
    assert "SLURM_PROCID must be an integer of at least 0, got 'x'" in refused(
        run, script, 'slurm', dict(task, SLURM_PROCID='x')
    )


def test_jobs_and_steps_of_slurm_have_ports_of_their_own(monkeypatch):
    monkeypatch.delenv('SLURM_JOB_ID', raising=False)
    assert _port_of_job() == 29500
    ports = set()
    for job in range(1000, 1040):
        for step in range(5):
            monkeypatch.setenv('SLURM_JOB_ID', str(job))
            monkeypatch.setenv('SLURM_STEP_ID', str(step))
            ports.add(_port_of_job())
    assert len(ports) == 200 and min(ports) > 9999 and max(ports) < 30000


def test_processes_of_two_runs_are_refused(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(
        'aft_mm.engine.runner.all_gather_object', lambda mine: [*seen, *(seen.append(mine) or seen)]
    )
    for folder in ('a', 'b'):  # of two machines
        (tmp_path / folder).mkdir()
        (tmp_path / folder / 'my.py').write_text(f'kinds = {{"x", "{folder}"}}')
        _check_same_run(Config.fromfile(tmp_path / folder / 'my.py'))
    (tmp_path / 'other.py').write_text('a = 1')
    message = 'all processes of a run must have the same config and job, got several'
    refuses_input(message, _check_same_run, Config.fromfile(tmp_path / 'other.py'))
    seen.pop()
    monkeypatch.setenv('SLURM_JOB_ID', '7')
    refuses_input(message, _check_same_run, Config.fromfile(tmp_path / 'a/my.py'))


def test_mpi(run, script):
    names = dict(RANK='0', SIZE='1', LOCAL_RANK='0')
    said = launch(run, script, 'mpi', {f'OMPI_COMM_WORLD_{k}': v for k, v in names.items()})
    assert said['wrapper'] == dict(
        type='MMDistributedDataParallel',
        broadcast_buffers=False,
        find_unused_parameters=False,
        device_ids=None,
    )


# Deleting a wrapper right after its last sum may wait forever: gloo joins its threads with Python's
# lock held, and a thread that releases the tensors of the sum needs that lock.
KEPT = []


@pytest.mark.parametrize(
    ('options', 'expected'),
    [
        ({}, True),
        (dict(find_unused_parameters=True), True),
        (dict(static_graph=True), False),
        (dict(sparse=True), False),
    ],
    ids=str,
)
def test_sums_are_fixed_before_training_and_leave_no_gradient(options, expected):
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    try:
        layer = nn.Embedding(5, 3, sparse=options.pop('sparse', False))
        assert not fix_sum_order(layer)
        model = nn.parallel.DistributedDataParallel(layer, **options)
        KEPT.append(model)
        assert fix_sum_order(model) == expected
        for _ in range(2):
            assert layer.weight.grad is None
            model(torch.tensor([1, 2, 1])).sum().backward()
            assert layer.weight.grad.to_dense().sum(1).tolist() == [0, 6, 3, 0, 0]
            model.zero_grad()
    finally:
        dist.destroy_process_group()


def test_one_process_starts_nothing():
    cfg = Config(dict(launcher='none'))
    start_distributed(cfg)
    assert not torch.distributed.is_initialized() and 'model_wrapper_cfg' not in cfg
