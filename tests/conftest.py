"""Fixtures that more than one test file needs."""

import argparse
import functools
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope

from aft_mm.cli.main import parse_args
from aft_mm.cli.parsers import COMMANDS

# Tools that run inside of the tests' process leave its allocator as it is.
os.environ['AFT_MM_MALLOC'] = 'system'
ROOT = Path(__file__).parent.parent
MISSING = [name for name in ('mmdet', 'mmseg') if not importlib.util.find_spec(name)]
collect_ignore = ['downstream'] if MISSING else []


@pytest.fixture(scope='session')
def root() -> Path:
    """The project folder."""
    return ROOT


@pytest.fixture(scope='session')
def missing_downstream() -> list[str]:
    """The modules without which tests/downstream is left out."""
    return MISSING


@pytest.fixture
def shared_data() -> Path:
    """Folder of the data packs: AFT_MM_DATA, or shared/data beside the checkout."""
    return Path(os.environ.get('AFT_MM_DATA') or ROOT.parent / 'shared' / 'data')


@pytest.fixture(scope='session')
def config() -> Callable[[str], str]:
    """The path of a config in tests/configs by its name."""
    return lambda name: str(ROOT / 'tests/configs' / f'{name}.py')


class WarmPython:
    """Runs scripts in forks of a Python that has imported what they need (`warm_python.py`)."""

    def __init__(self, streams: Path):
        self.streams = streams
        self.runs = 0

    @functools.cached_property
    def process(self) -> subprocess.Popen:
        """Started with the first script, with the module path of none."""
        environment = {**os.environ, 'PYTHONPATH': '', 'OMP_NUM_THREADS': '1'}
        return subprocess.Popen(
            [sys.executable, ROOT / 'tests/warm_python.py'],
            cwd=self.streams,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(self, command: list[str], cwd: Path, env: dict[str, str]):
        """As subprocess.run does, with the output captured as text."""
        self.runs += 1
        streams = self.streams / str(self.runs)
        message = dict(
            script=command[0],
            arguments=command[1:],
            folder=str(cwd),
            environment=env,
            streams=str(streams),
        )
        print(json.dumps(message), file=self.process.stdin, flush=True)
        code = int(self.process.stdout.readline())
        output, errors = (streams.with_suffix(end).read_text() for end in ('.out', '.err'))
        return subprocess.CompletedProcess(command, code, output, errors)

    def close(self) -> None:
        """End it if it was started."""
        if 'process' in vars(self):
            self.process.communicate()


@pytest.fixture(scope='session')
def run(tmp_path_factory) -> Iterator[Callable[..., subprocess.CompletedProcess]]:
    """Run a command of the project in a folder; ``env`` adds to the environment.

    A script runs in a fork of a warm Python, unless `fresh` asks for one of its own or there is a
    CUDA device, which does not outlive a fork.
    """
    warm = WarmPython(tmp_path_factory.mktemp('streams'))

    def call(*command, cwd, env=None, fresh=False):
        paths = [str(ROOT / 'tests/configs'), os.environ.get('PYTHONPATH', '')]
        with socket.socket() as free:
            free.bind(('127.0.0.1', 0))
            port = str(free.getsockname()[1])
        environment = {
            **os.environ,
            'PYTHONPATH': os.pathsep.join(filter(None, paths)),
            'PORT': port,
            'MASTER_PORT': port,
            'PYTHON': sys.executable,
            'OMP_NUM_THREADS': '1',
            **(env or {}),
        }
        command = [str(part) for part in command]
        if command[0].endswith('.py'):
            if not (fresh or torch.cuda.is_available()):
                return warm.run(command, cwd, environment)
            command = [sys.executable, *command]
        return subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
        )

    yield call
    warm.close()


class Command:
    """A command of aft_mm in this process: `main` and `parse_args` take words, the rest is what its
    module has.
    """

    def __init__(self, name: str):
        self.name = name.replace('_', '-')
        self.module = importlib.import_module(f'aft_mm.cli.commands.{COMMANDS[self.name][0]}')

    def parse_args(self, words: list[str]) -> argparse.Namespace:
        return parse_args(self.name, words)

    def main(self, words: list[str]) -> None:
        self.module.main(self.parse_args(words))

    def __getattr__(self, attribute: str):
        return getattr(self.module, attribute)


@pytest.fixture
def tool(root, monkeypatch) -> Callable[[str], ModuleType | Command]:
    """A tool as a module, for what ends before a run starts."""
    monkeypatch.setenv('LOCAL_RANK', '0')  # the tools set it
    monkeypatch.syspath_prepend(str(root / 'tests/configs'))

    def load(name):
        if '/' not in name and name != 'launch':
            return Command(name)
        path = root / f'tools/{name}.py'
        monkeypatch.syspath_prepend(str(path.parent))  # where a script finds its neighbours
        spec = importlib.util.spec_from_file_location(f'tool_{name}', path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope='session')
def untrained(tmp_path_factory) -> dict[str, tuple[str, str]]:
    """Config and checkpoint files of an untrained model of every kind that draws."""
    folder = tmp_path_factory.mktemp('untrained')
    found = {}
    for name in ('tiny_text', 'tiny_pixels', 'tiny_super_resolution', 'tiny_clouds'):
        config = Config.fromfile(ROOT / f'tests/configs/{name}.py', import_custom_modules=False)
        config.pop('custom_imports')  # the hooks of the tests, which a person does not have
        config.dump(folder / f'{name}.py')
        torch.manual_seed(0)
        model = MODELS.build(dict(config.model, type='aft_mm.AutoregressiveModel'))
        if model.encoder is not None:  # else the source hardly changes what is drawn
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.4)
        else:
            with torch.no_grad():  # logits far enough apart to show what a temperature does
                model.head.weight.mul_(100)
        torch.save(dict(state_dict=model.state_dict(), meta={}), folder / f'{name}.pth')
        found[name] = str(folder / f'{name}.py'), str(folder / f'{name}.pth')
    return found


@pytest.fixture(scope='session')
def tiny_classifier(tmp_path_factory) -> tuple[str, str]:
    """Config and checkpoint files of a classifier of 8 x 12 RGB images, 4 x 6 tokens, 5 classes."""
    folder = tmp_path_factory.mktemp('classifier')
    config = Config.fromfile(ROOT / 'tests/configs/tiny_images.py', import_custom_modules=False)
    config.custom_imports.imports = ['aft_mm.registry']
    config.pop('default_hooks')
    config.pop('custom_hooks')
    config.model.backbone.img_size = (8, 12)
    config.model.backbone.token_mixer.kernel_size = (3, 5)
    config.model.head.num_classes = config.data_preprocessor.num_classes = 5
    config.test_dataloader.dataset.pipeline = [
        dict(type='LoadImageFromFile'),
        dict(type='Resize', scale=(12, 8)),
        dict(type='PackInputs'),
    ]
    config.dump(folder / 'classifier.py')
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        model = MODELS.build(config.model)
    for parameter in model.parameters():  # far enough from 0 to see
        torch.nn.init.normal_(parameter, std=0.5)
    meta = dict(dataset_meta=dict(classes=('ant', 'bee', 'cat', 'dog', 'elk')))
    torch.save(dict(state_dict=model.state_dict(), meta=meta), folder / 'classifier.pth')
    return str(folder / 'classifier.py'), str(folder / 'classifier.pth')


@pytest.fixture(scope='session')
def digits_classifier(tmp_path_factory) -> tuple[str, str]:
    """Config and checkpoint files of an untrained AFT-conv on digits whose biases are not 0."""
    folder = tmp_path_factory.mktemp('digits_classifier')
    config = Config.fromfile(ROOT / 'tests/configs/tiny.py', import_custom_modules=False)
    config.pop('custom_imports')
    config.dump(folder / 'tiny.py')
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        model = MODELS.build(config.model)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    torch.save(dict(state_dict=model.state_dict(), meta={}), folder / 'tiny.pth')
    return str(folder / 'tiny.py'), str(folder / 'tiny.pth')
