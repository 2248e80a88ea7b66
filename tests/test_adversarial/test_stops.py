"""Signals in the middle of a library end a run with its message and status, whatever the library catches."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.adversarial

# Stops the run inside of the function that STOP_INSIDE names.
HOOK = """
import importlib, os, signal

module, _, name = os.environ['STOP_INSIDE'].partition(':')
*owners, name = name.split('.')
owner = importlib.import_module(module)
for part in owners:
    owner = getattr(owner, part)
function = getattr(owner, name)

def stopped(*args, **kwargs):
    setattr(owner, name, function)
    try:
        for signum in os.environ['STOP_BY'].split():
            os.kill(os.getpid(), int(signum))
        return function(*args, **kwargs)
    except BaseException:
        raise SyntaxError('of the library')

setattr(owner, name, stopped)
"""


@pytest.mark.parametrize(
    ('function', 'signals', 'message'),
    [
        ('mmengine.config.config:FormatCode', ['SIGTERM'], ''),
        (
            'torch.utils.data:DataLoader.__iter__',
            ['SIGHUP', 'SIGINT'],
            '; there is no checkpoint yet',
        ),
        (
            'mmengine.evaluator:Evaluator.evaluate',
            ['SIGINT'],
            '; the last checkpoint is {}; to resume',
        ),
        ('aft_mm.cli.commands.train:plot', ['SIGHUP'], '; the last checkpoint is {}; to resume'),
    ],
    ids=['start', 'twice', 'validation', 'end'],
)
def test_a_stop_inside_of_a_library(function, signals, message, run, root, config, tmp_path):
    (tmp_path / 'stop_inside.py').write_text(HOOK)
    (tmp_path / 'config.py').write_text(
        f'_base_ = {config("tiny_without_chance")!r}\n'
        'custom_imports = dict(imports=["aft_mm.registry", "recording_hooks", "stop_inside"])\n'
        'train_cfg = dict(max_epochs=1)\n'
    )
    numbers = [getattr(signal, name) for name in signals]
    env = dict(STOP_INSIDE=function, STOP_BY=' '.join(str(int(number)) for number in numbers))
    words = root / 'tools/train.py', 'config.py', '--work-dir', 'work'
    done = run(*words, cwd=tmp_path, env=dict(env, PYTHONPATH=f'{root}/tests/configs:{tmp_path}'))
    assert done.returncode == 128 + numbers[-1], done.stderr
    assert 'Traceback' not in done.stderr
    checkpoint = Path(tmp_path, 'work/epoch_1.pth').resolve()
    last = f'{signals[-1]} stopped the run{message.format(checkpoint)}'
    assert done.stderr.splitlines()[-1].startswith(last)


def test_an_import_ends_without_a_traceback():
    script = (
        'import os, signal, sys\n'
        'class Finder:\n'
        '    def find_spec(name, *others):\n'
        '        if name == "torch":\n'
        '            os.kill(os.getpid(), signal.SIGINT)\n'
        'sys.meta_path.insert(0, Finder)\n'
        'signal.signal(signal.SIGINT, signal.default_int_handler)\n'
        'from aft_mm.cli.main import main\n'
        'sys.argv = ["aft_mm", "train", "aft-conv-quickstart_1xb64-50e_digits"]\n'
        'main()\n'
    )
    done = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, '')
