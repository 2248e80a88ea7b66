"""Start train.py or test.py in several processes, and report why they failed.

For several machines set NNODES, NODE_RANK, MASTER_ADDR, PORT, and RDZV_TIMEOUT, the seconds to wait
for the others (default 600).
"""

import argparse
import errno
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from aft_mm.errors import PEER_DIED, UserError, user_errors

FILES = dict(train=['config'], test=['config', 'checkpoint'])


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    tasks = parser.add_subparsers(dest='task', required=True)
    for task, files in FILES.items():
        words = tasks.add_parser(task, prog=f'dist_{task}.sh', help=f'run {task}.py')
        for file in files:
            words.add_argument(file, metavar=file.upper())
        words.add_argument('gpus', metavar='GPUS', help='number of processes on this machine')
        words.add_argument('rest', nargs=argparse.REMAINDER, help=f'arguments of {task}.py')
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()  # before the slow imports

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args as parse_torchrun
from torch.distributed.run import run

# Which would name the first process that ended, and as its reason the others.
logging.getLogger('torch.distributed.elastic.multiprocessing.api').setLevel(logging.CRITICAL)
# Default and minimum.
VARIABLES = dict(NNODES=(1, 1), NODE_RANK=(0, 0), PORT=(29500, 1), RDZV_TIMEOUT=(600, 1))


def number(name: str, text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise UserError(f'{name} must be a number of at least {least}, got {text!r}')
    return int(text)


def torchrun_words(args: argparse.Namespace) -> list[str]:
    """Return the arguments of torchrun; refuse those that would make it wait without a message."""
    gpus = number('GPUS', args.gpus, 1)
    nodes, rank, port, timeout = (
        number(name, os.environ.get(name) or str(usual), least)
        for name, (usual, least) in VARIABLES.items()
    )
    address = os.environ.get('MASTER_ADDR', '127.0.0.1')
    if rank >= nodes:
        raise UserError(f'NODE_RANK must be 0 to {nodes - 1} with NNODES={nodes}, got {rank}')
    if rank == 0:
        check_port(port)
    if nodes > 1:
        print(
            f'machine {rank} of {nodes} waits up to {timeout} s for the others at '
            f'{address}:{port} (NNODES, NODE_RANK, MASTER_ADDR, PORT, RDZV_TIMEOUT)',
            file=sys.stderr,
            flush=True,
        )
    script = Path(__file__).with_name(f'{args.task}.py')
    return [
        f'--nnodes={nodes}',
        f'--node_rank={rank}',
        f'--master_addr={address}',
        f'--master_port={port}',
        f'--nproc_per_node={gpus}',
        f'--rdzv_conf=timeout={timeout}',
        str(script),
        *(getattr(args, file) for file in FILES[args.task]),
        '--launcher',
        'pytorch',
        *args.rest,
    ]


def check_port(port: int) -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(('', port))
            listener.listen(1)
        except (OSError, OverflowError) as error:
            taken = getattr(error, 'errno', None) == errno.EADDRINUSE
            raise UserError(
                f'PORT={port} {"is taken by another run" if taken else "cannot be used"} on this '
                'machine; set PORT to a free one, the same on every machine'
            ) from error


def root_cause(failures: dict[int, ProcessFailure]) -> str:
    # Killed processes leave no message, and others may report the loss first.
    order = sorted(
        failures,
        key=lambda rank: (
            failures[rank].exitcode != -signal.SIGKILL,
            PEER_DIED in message_of(failures[rank]),
            failures[rank].exitcode in (-signal.SIGTERM, -signal.SIGINT),
            failures[rank].timestamp,
        ),
    )
    failure = failures[order[0]]
    message = message_of(failure)
    if not message:
        message = (
            f'it was killed by {failure.signal_name()}'
            if failure.exitcode < 0
            else f'it ended with status {failure.exitcode} and says why above'
        )
    return f'process {order[0]} (pid {failure.pid}): {message}'


def message_of(failure: ProcessFailure) -> str:
    if not failure.error_file_data or not Path(failure.error_file).is_file():
        return ''
    message = failure.message
    text = message if isinstance(message, str) else message['message']
    return re.sub(r'^\w+: ', '', text)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with user_errors():
        words = torchrun_words(args)
    try:
        run(parse_torchrun(words))
    except ChildFailedError as error:
        raise SystemExit(f'Error: {root_cause(error.failures)}') from None
    except SignalException as error:
        print(f'{error.sigval.name} stopped the launcher and its processes', file=sys.stderr)
        raise SystemExit(128 + error.sigval) from None
    except DistError as error:
        reason = ' '.join(str(error).split())
        raise SystemExit(
            f'Error: the machines did not meet ({reason:.200}); check that all have '
            'the same NNODES, MASTER_ADDR and PORT, and different values of NODE_RANK'
        ) from None


if __name__ == '__main__':
    main()
