"""Start and end of a distributed run on machines without an accelerator.

mmengine starts NCCL runs itself; on a CPU its start-up fails, because it asks for a CUDA device
whatever the backend.
"""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time

import torch.distributed as dist
from mmengine.config import Config
from mmengine.device import get_device

from aft_mm.errors import UserError

_LOOK_AFTER = 1  # seconds between two looks at the launcher
_GRACE = 30  # seconds, as torchrun leaves its processes
# Where each launcher says what torch reads from RANK, WORLD_SIZE and LOCAL_RANK.
_RANK_VARIABLES = {
    'pytorch': ('RANK', 'WORLD_SIZE', 'LOCAL_RANK'),
    'slurm': ('SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_LOCALID'),
    'mpi': ('OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_LOCAL_RANK'),
}


def start_distributed(cfg: Config) -> None:
    """Translate the launcher's environment to torch's and, on a CPU, join a gloo group.

    On a CPU it also completes ``cfg.model_wrapper_cfg``: DistributedDataParallel takes no device
    ids there. Does nothing for ``cfg.launcher == 'none'``.

    In any case a process ends soon after the one that launched it.

    Raises:
        UserError: the launcher did not set its environment variables.
    """
    if cfg.launcher == 'none':
        return
    _export_environment(cfg.launcher)
    threading.Thread(target=_end_with_launcher, args=(os.getppid(),), daemon=True).start()
    if get_device() != 'cpu':
        return
    dist.init_process_group('gloo')
    atexit.register(_leave_gloo)
    cfg.setdefault(
        'model_wrapper_cfg',
        dict(
            type='MMDistributedDataParallel',
            broadcast_buffers=False,
            find_unused_parameters=cfg.get('find_unused_parameters', False),
        ),
    )
    cfg.model_wrapper_cfg.setdefault('device_ids', None)


def _export_environment(launcher: str) -> None:
    for target, source in zip(_RANK_VARIABLES['pytorch'], _RANK_VARIABLES[launcher], strict=True):
        if source not in os.environ:
            raise UserError(
                f'launcher={launcher!r} needs the environment variable {source}, which '
                'is not set; start through tools/dist_train.sh, srun or mpirun'
            )
        os.environ[target] = os.environ[source]
    if launcher == 'slurm' and 'MASTER_ADDR' not in os.environ:
        hosts = subprocess.run(
            ['scontrol', 'show', 'hostnames', os.environ['SLURM_NODELIST']],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        os.environ['MASTER_ADDR'] = hosts.split()[0]
    os.environ.setdefault('MASTER_ADDR', '127.0.0.1')
    os.environ.setdefault('MASTER_PORT', '29500')


def _end_with_launcher(launcher: int) -> None:
    """End this process as SIGTERM does when the one that launched it is gone.

    Nobody else would: the processes of a launcher that was killed keep training.
    """
    while os.getppid() == launcher:
        time.sleep(_LOOK_AFTER)
    print(
        'the process that launched this one is gone, so that it ends, too',
        file=sys.stderr,
        flush=True,
    )
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os._exit(1)  # it waits for a process that has ended


def _leave_gloo() -> None:
    # A gloo thread that still frees its last tensors while the interpreter ends aborts the
    # process (pytorch/pytorch#190489); a short rest lets it finish.
    time.sleep(0.2)
    if dist.is_initialized():
        dist.destroy_process_group()
