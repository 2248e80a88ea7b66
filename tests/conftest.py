"""Shared fixtures."""

import argparse
import atexit
import gc
import importlib.util
import itertools
import logging
import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

# A fork cannot use the threads of its parent process.
os.environ['OMP_NUM_THREADS'] = '1'
# Garbage collection takes 7 % of the time with the usual thresholds; each file begins with one.
gc.set_threshold(5_000, 10, 30)

import cv2  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from filelock import FileLock  # noqa: E402
from mmengine.config import Config  # noqa: E402
from mmengine.logging import MessageHub, MMLogger  # noqa: E402
from mmengine.registry import MODELS, DefaultScope  # noqa: E402
from mmengine.visualization import Visualizer  # noqa: E402

from aft_mm.cli.main import COMMANDS, parse_args  # noqa: E402
from aft_mm.export import operators  # noqa: E402

from .helpers import free_port, load_script  # noqa: E402
from .parallel_data import write_pairs  # noqa: E402

cv2.setNumThreads(0)
# In a fork of a process whose first backward pass is a compiled one, torch refuses a backward pass.
torch.ones(1, requires_grad=True).backward()
# Inductor compiles in the process of a test.
os.environ['TORCHINDUCTOR_COMPILE_THREADS'] = '1'
# Commands that run in the test process do not change its memory allocator.
os.environ['AFT_MM_MALLOC'] = 'system'
ROOT = Path(__file__).parent.parent
# Scripts that tests import, and that import each other.
sys.path += [str(ROOT / 'tools' / name) for name in ('analysis_tools', 'benchmarks')]
SECONDS = 300  # time limit of a run
# The registry first: it supplies the operators of mmcv that its first import needs.
RUN_IMPORTS = ['aft_mm.registry']
RUN_IMPORTS += [
    f'mmpretrain.{name}' for name in ('apis', 'datasets', 'engine', 'evaluation', 'models')
]
RUN_IMPORTS += [f'aft_mm.{name}' for name in ('apis', 'datasets', 'engine', 'evaluation', 'models')]
RUN_IMPORTS += ['mmengine._strategy', 'torch.utils.tensorboard']
# Files of one worker, which then loads and builds all configs once, and imports the exporters.
TOGETHER = {
    'configs': ('test_configs', 'test_config_models', 'test_recipes', 'test_runtimes'),
    'exports': ('test_graphs', 'test_exported_predictions', 'test_op_graphs', 'test_torch_export'),
}
MISSING = [name for name in ('mmdet', 'mmseg') if not importlib.util.find_spec(name)]
collect_ignore = ['downstream'] if MISSING else []


def pytest_report_header() -> str | None:
    if not MISSING:
        return None
    return f'tests/downstream is left out without {", ".join(MISSING)}: make downstream'


def pytest_collection_modifyitems(items):
    """Begin with the files of slow tests, so that the workers of `make test` end at the same time."""
    slow = {item.path for item in items if item.get_closest_marker('slow')}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Run each group of TOGETHER in one worker of `--dist loadfile`, as if it were one file."""
    if config.getvalue('dist') != 'loadfile':
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            stem = Path(file).stem
            return next((group for group, names in TOGETHER.items() if stem in names), file)

    return Scheduling(config, log)


@pytest.fixture(scope='module', autouse=True)
def frozen_imports():
    """Exempt what is loaded from garbage collection, which datasets and compilers often start."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def settings_of_one_test():
    """Take back the default scope, in which other types are found, and the flush of denormals."""
    yield
    DefaultScope._instance_dict.clear()
    torch.set_flush_denormal(False)


@pytest.fixture(scope='session', autouse=True)
def short_waits():
    """Wait less for workers of data loaders that garbage collection ends.

    It closes their queues before the loader tells them to stop, which otherwise waits 5 s for each.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL', 0.2)
        yield


@pytest.fixture(scope='session', autouse=True)
def short_runs():
    """Leave out of runs what takes half of their time; return the function that plots.

    This is the formatting of configs as text, which stays valid, mmengine's report on the
    environment, and the pictures after a training.
    """
    plot = importlib.import_module('aft_mm.cli.commands.train').plot
    with pytest.MonkeyPatch.context() as patch:
        # The fork of mmengine has no such function.
        patch.setattr(
            'mmengine.config.config.FormatCode', lambda text, **options: (text, True), raising=False
        )
        patch.setattr('mmengine.runner.runner.collect_env', dict)
        patch.setattr('aft_mm.cli.commands.train.plot', lambda *words, out: out)
        yield plot


@pytest.fixture
def with_plots(short_runs, monkeypatch):
    monkeypatch.setattr('aft_mm.cli.commands.train.plot', short_runs)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty working folder, where AFT_MM_DATA is not set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv('AFT_MM_DATA', raising=False)
    return tmp_path


@pytest.fixture(scope='session')
def openvino_loops(tmp_path_factory) -> Callable[[], Path]:
    """Return the loops for OpenVINO, which take ten seconds, compiled once per compiler and run."""
    folder = tmp_path_factory.getbasetemp()
    if 'PYTEST_XDIST_WORKER' in os.environ:
        folder = folder.parent
    compile_loops = operators.compile_for_openvino

    def call():
        library = folder / f'{operators.find_compiler().replace("/", "_")}.so'
        with FileLock(f'{library}.lock'):
            if not library.exists():
                compile_loops(library)
        return library

    return call


@pytest.fixture(scope='session')
def root() -> Path:
    return ROOT


@pytest.fixture(scope='session')
def missing_downstream() -> list[str]:
    return MISSING


@pytest.fixture
def shared_data() -> Path:
    found = ROOT / 'data' if (ROOT / 'data').is_dir() else ROOT.parent / 'shared' / 'data'
    return Path(os.environ.get('AFT_MM_DATA') or found)


@pytest.fixture
def pack(shared_data) -> Callable[[str], Path]:
    """Return the folder of a data pack; the test is skipped where it is missing."""

    def find(name):
        if not (shared_data / name).is_dir():
            pytest.skip(f'the pack {name} is not at {shared_data}')
        return shared_data / name

    return find


@pytest.fixture(scope='session')
def config() -> Callable[[str], str]:
    return lambda name: str(ROOT / 'tests/configs' / f'{name}.py')


def _become(command: list[str], cwd: Path, env: dict[str, str], streams: Path) -> None:
    """Run a script in this fork like ``python script arguments``."""
    for descriptor, name in enumerate(('/dev/null', f'{streams}.out', f'{streams}.err')):
        file = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = (open(i, 'rw'[i > 0]) for i in range(3))
    # Remove the state that tests left in this process.
    gc.freeze()  # objects of the tests are not finalised here
    atexit._clear()
    logging.root.handlers.clear()
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter('ignore', category)
    # Instances are kept per class, and mmdet and mmseg have visualizers of their own.
    managers = [DefaultScope, MMLogger, MessageHub, Visualizer]
    while managers:
        manager = managers.pop()
        manager._instance_dict.clear()
        managers += manager.__subclasses__()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored if the tests run under nohup
    random.seed()
    np.random.seed()
    torch.seed()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [str(Path(command[0]).parent), *filter(None, env['PYTHONPATH'].split(':'))]
    sys.argv = command
    try:
        runpy.run_path(command[0], run_name='__main__')
    finally:
        atexit._run_exitfuncs()


def _run_in_forks(
    command: list[str], cwd: Path, environments: list[dict[str, str]], streams: Path
) -> subprocess.CompletedProcess:
    """Run a script in a fork per environment, which saves the time to import torch and OpenMMLab.

    Return the streams of all forks and the first exit code that is not 0.
    """
    processes = [
        multiprocessing.get_context('fork').Process(
            target=_become, args=(command, cwd, env, Path(f'{streams}_{rank}'))
        )
        for rank, env in enumerate(environments)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + SECONDS
    for process in processes:
        process.join(max(0, end - time.monotonic()))
    if any(process.exitcode is None for process in processes):
        for process in processes:
            process.kill()
        raise subprocess.TimeoutExpired(command, SECONDS)
    output, errors = (
        ''.join(Path(f'{streams}_{rank}.{end}').read_text() for rank in range(len(processes)))
        for end in ('out', 'err')
    )
    code = next((process.exitcode for process in processes if process.exitcode), 0)
    return subprocess.CompletedProcess(command, code, output, errors)


@pytest.fixture(scope='session')
def run(tmp_path_factory) -> Callable[..., subprocess.CompletedProcess]:
    """Run a command of the project in a folder; ``env`` adds to the environment.

    A script runs in a fork of this process, or in several that can form a group with `ranks`. It
    runs in new Python processes with `fresh`, for tests of the start itself, and on machines with a
    CUDA device, which a fork cannot use.
    """
    streams = tmp_path_factory.mktemp('streams')
    numbers = itertools.count()
    for module in RUN_IMPORTS:
        importlib.import_module(module)

    def call(*command, cwd, env=None, fresh=False, ranks=None):
        paths = [str(ROOT / 'tests/configs'), os.environ.get('PYTHONPATH', '')]
        port = str(free_port())
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
                each = [environment]
                if ranks:
                    group = dict(environment, MASTER_ADDR='127.0.0.1', WORLD_SIZE=str(ranks))
                    each = [
                        dict(group, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(ranks)
                    ]
                return _run_in_forks(command, cwd, each, streams / str(next(numbers)))
            if ranks:
                launch = '-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={ranks}'
                command = [*launch, *command]
            command = [sys.executable, *command]
        return subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=SECONDS
        )

    return call


class Command:
    """A command of aft_mm in this process, with `main`, `parse_args` and the rest of its module."""

    def __init__(self, name: str):
        self.name = name.replace('_', '-')
        self.module = importlib.import_module(f'aft_mm.{COMMANDS[self.name]}')

    def parse_args(self, words: list[str]) -> argparse.Namespace:
        return parse_args(self.name, words)

    def main(self, words: list[str]) -> None:
        """Run the command without the checks of its files that come first."""
        self.module.run(self.parse_args(words))

    def __getattr__(self, attribute: str):
        return getattr(self.module, attribute)


@pytest.fixture
def tool(root, monkeypatch) -> Callable[[str], ModuleType | Command]:
    monkeypatch.setenv('LOCAL_RANK', '0')
    monkeypatch.syspath_prepend(str(root / 'tests/configs'))

    def load(name):
        if '/' not in name and name != 'launch':
            return Command(name)
        monkeypatch.syspath_prepend(str((root / f'tools/{name}.py').parent))
        return load_script(f'tools/{name}')

    return load


@pytest.fixture(scope='session')
def untrained(tmp_path_factory) -> dict[str, tuple[str, str]]:
    folder = tmp_path_factory.mktemp('untrained')
    found = {}
    for name in ('tiny_text', 'tiny_pixels', 'tiny_super_resolution', 'tiny_clouds'):
        config = Config.fromfile(ROOT / f'tests/configs/{name}.py', import_custom_modules=False)
        config.pop('custom_imports')  # hooks of the tests, which users do not have
        config.dump(folder / f'{name}.py')
        torch.manual_seed(0)
        model = MODELS.build(dict(config.model, type='aft_mm.AutoregressiveModel'))
        if model.encoder is not None:  # otherwise the source hardly changes the samples
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.4)
        else:
            with torch.no_grad():  # logits that differ enough for the temperature to matter
                model.head.weight.mul_(100)
        torch.save(dict(state_dict=model.state_dict(), meta={}), folder / f'{name}.pth')
        found[name] = str(folder / f'{name}.py'), str(folder / f'{name}.pth')
    return found


@pytest.fixture(scope='module')
def resolver(untrained):
    from aft_mm.apis import SuperResolver

    return SuperResolver(*untrained['tiny_super_resolution'], device='cpu')


@pytest.fixture(scope='module')
def pairs(tmp_path_factory) -> Path:
    """Folder with the artificial language pair of parallel_data.py."""
    write_pairs(folder := tmp_path_factory.mktemp('pairs'))
    return folder


@pytest.fixture(scope='session')
def tiny_classifier(tmp_path_factory) -> tuple[str, str]:
    """Config and checkpoint of a classifier of 8 x 12 RGB images, 4 x 6 tokens, 5 classes."""
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
    for parameter in model.parameters():  # visibly different from 0
        torch.nn.init.normal_(parameter, std=0.5)
    meta = dict(dataset_meta=dict(classes=('ant', 'bee', 'cat', 'dog', 'elk')))
    torch.save(dict(state_dict=model.state_dict(), meta=meta), folder / 'classifier.pth')
    return str(folder / 'classifier.py'), str(folder / 'classifier.pth')


@pytest.fixture
def multi_label(tmp_path) -> Callable[..., tuple[str, str]]:
    """Return a function that gives a classifier a multi-label head with the same weights."""

    def make(path, checkpoint, **rule):
        config = Config.fromfile(path, import_custom_modules=False)
        sizes = {key: config.model.head[key] for key in ('num_classes', 'in_channels')}
        config.model.head = dict(type='MultiLabelLinearClsHead', **sizes, **rule)
        config.dump(tmp_path / 'labels.py')
        return str(tmp_path / 'labels.py'), str(checkpoint)

    return make


@pytest.fixture(scope='session')
def digits_classifier(tmp_path_factory) -> tuple[str, str]:
    """Config and checkpoint of an untrained AFT-conv on digits whose biases are not 0."""
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
