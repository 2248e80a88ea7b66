"""Start and end of a distributed run, also on a CPU, and its order of sums."""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist
from mmengine.config import Config
from mmengine.device import get_device
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from aft_mm.errors import UserError

_POLL_SECONDS = 1
_GRACE_SECONDS = 30  # between SIGTERM and exit, as torchrun's
_RANK_VARIABLES = {
    'pytorch': ('RANK', 'WORLD_SIZE', 'LOCAL_RANK'),
    'slurm': ('SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_LOCALID'),
    'mpi': ('OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_LOCAL_RANK'),
}


def start_distributed(cfg: Config) -> None:
    """Set torch's environment variables from the launcher's; on a CPU, join a gloo group.

    The process ends with its launcher.

    Raises:
        UserError: The launcher did not set its environment variables.
    """
    if cfg.launcher == 'none':
        return
    _export_environment(cfg.launcher)
    threading.Thread(target=_end_with_launcher, args=(os.getppid(),), daemon=True).start()
    if get_device() != 'cpu':
        return
    dist.init_process_group('gloo')
    atexit.register(_leave_gloo)
    wrapper = dict(type='MMDistributedDataParallel', broadcast_buffers=False)
    wrapper['find_unused_parameters'] = cfg.get('find_unused_parameters', False)
    cfg.setdefault('model_wrapper_cfg', wrapper)
    cfg.model_wrapper_cfg.setdefault('device_ids', None)


def fix_sum_order(model: nn.Module) -> bool:
    """Make every iteration add up the gradients of several processes in the same order.

    DistributedDataParallel changes its buckets, on which the order depends, after the first
    backward pass: a resumed run would round its first step differently. A backward pass without
    data makes it choose the final ones.

    Returns:
        False if the model is not a DistributedDataParallel with the usual buckets.
    """
    if not (isinstance(model, DistributedDataParallel) and hasattr(model, 'reducer')):
        return False
    if model.static_graph or any(getattr(module, 'sparse', False) for module in model.modules()):
        return False
    if not model.find_unused_parameters:  # else the first buckets are the final ones
        model.reducer.prepare_for_backward([])
        # As in a model, gradients of the first parameters come last.
        sums = [value.sum() for value in model.parameters() if value.requires_grad]
        torch.autograd.backward(sums)
        model.zero_grad()
    return True


def _export_environment(launcher: str) -> None:
    for target, source in zip(_RANK_VARIABLES['pytorch'], _RANK_VARIABLES[launcher], strict=True):
        if source not in os.environ:
            raise UserError(
                f'launcher={launcher!r} needs the environment variable {source}, which '
                'is not set; start through tools/dist_train.sh, srun or mpirun'
            )
        os.environ[target] = os.environ[source]
    if launcher == 'slurm' and 'MASTER_ADDR' not in os.environ:
        command = ['scontrol', 'show', 'hostnames', os.environ['SLURM_NODELIST']]
        hosts = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        os.environ['MASTER_ADDR'] = hosts.split()[0]
    os.environ.setdefault('MASTER_ADDR', '127.0.0.1')
    os.environ.setdefault('MASTER_PORT', '29500')


def _end_with_launcher(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_POLL_SECONDS)
    print(
        'the process that launched this one is gone, so this one ends, too',
        file=sys.stderr,
        flush=True,
    )
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    os._exit(1)  # it waits for a process that has ended


def _leave_gloo() -> None:
    # A gloo thread that frees tensors at exit aborts the process (pytorch/pytorch#190489).
    time.sleep(0.2)
    if dist.is_initialized():
        dist.destroy_process_group()
