"""A Python that has imported the packages of the tools and forks for every command it is told.

To import torch and OpenMMLab takes longer than most of what the tests run. A fork runs a script as
``python script arguments`` does: ``__main__``, folder, environment, module path, standard streams
and the end of the interpreter are its own. aft_mm is not imported before the fork.

Reads commands from stdin and writes exit codes to stdout, both as lines of JSON.
"""

import json
import os
import random
import runpy
import signal
import sys
from pathlib import Path

import matplotlib.pyplot  # noqa: F401
import mmengine.runner  # noqa: F401
import mmpretrain.datasets
import mmpretrain.models  # noqa: F401
import numpy as np

SECONDS = 300


def become(script: str, arguments: list[str], folder: str, environment: dict, streams: str) -> None:
    """Give this process what a new one has."""
    for number, name in enumerate(('/dev/null', f'{streams}.out', f'{streams}.err')):
        file = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(file, number)
        os.close(file)
    signal.alarm(SECONDS)  # the end of a run that hangs
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    paths = environment.get('PYTHONPATH', '').split(os.pathsep)
    sys.path[:1] = [str(Path(script).parent), *filter(None, paths)]
    sys.argv = [script, *arguments]
    random.seed()
    np.random.seed()


def serve() -> dict | None:
    """Fork for each command; in a fork the command, at the end None."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            return json.loads(line)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


if __name__ == '__main__':
    command = serve()
    if command is not None:
        become(**command)
        runpy.run_path(command['script'], run_name='__main__')
