"""``aft_mm doctor``: check the environment, and with --kernels the GPU kernels."""

import argparse
import importlib
import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from aft_mm.cli.environment import (
    SAME_MODULES,
    installed,
    own_requirements,
    problems,
    torch_requirement,
)
from aft_mm.config.finding import install_command, install_root
from aft_mm.errors import UserError, user_errors

from ... import __version__
from .list_configs import NEEDS, is_installed, missing

#: Packages that a bug report should name, in addition to those of SAME_MODULES.
SHOWN = ('torch', 'torchvision', 'triton', 'numpy', 'setuptools')
#: What a training imports.
IMPORTED = ['torch', 'torchvision', 'mmengine', 'aft_mm.registry', 'mmcv', 'mmcv.ops']
IMPORTED += [
    f'{host}.{part}'
    for host in ('mmpretrain', 'mmdet', 'mmseg', 'aft_mm')
    for part in ('models', 'datasets', 'evaluation', 'visualization')
]
IMPORTED += ['torch.utils.tensorboard', 'aft_mm.cli.commands.train']
DATA = re.compile(r'\{\{\$AFT_MM_DATA:data\}\}/([\w.-]+)')


def broken_imports() -> Iterator[tuple[str, str]]:
    """Yield packages that cannot be imported, each with a command that fixes it."""
    broken: set[str] = set()
    for module in IMPORTED:
        name = module.partition('.')[0]
        if name in broken or not is_installed(name):
            continue
        if name == 'aft_mm' and 'mmengine' in broken:
            continue
        try:
            importlib.import_module(module)
        except Exception as error:
            broken.add(name)
            reason = ' '.join(str(error).split())
            lacks = error.name if isinstance(error, ModuleNotFoundError) and error.name else ''
            package = SAME_MODULES.get(lacks, (lacks,))[0]
            there = installed()
            wheel = next((other for other in SAME_MODULES.get(name, ()) if other in there), name)
            yield (
                f'{module} cannot be imported ({type(error).__name__}: {reason:.200})',
                f'pip install {package or f"--force-reinstall --no-deps {wheel}"}',
            )


def wrong_settings() -> Iterator[tuple[str, str]]:
    try:
        install_root()
    except UserError as error:
        yield str(error), 'pip install --force-reinstall --no-deps aft_mm'
    try:
        importlib.import_module('aft_mm.ops.dispatch').requested_backends()
    except ValueError as error:
        yield str(error), 'unset AFT_MM_BACKEND'
    except (ImportError, OSError):
        return  # broken_imports reports it


def print_devices() -> None:
    torch = importlib.import_module('torch')
    threads = torch.get_num_threads()
    print(
        f'cpu: {torch.backends.cpu.get_cpu_capability()}, {threads} threads '
        f'(OMP_NUM_THREADS={os.environ.get("OMP_NUM_THREADS", "not set")})'
    )
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        print(
            f'cuda:{index}: {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}'
            f'{gpu.minor}'
        )
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip or 'the CPU'
        print(f'cuda: none (torch is built for {built})')
    if torch.backends.mps.is_available():
        print('mps: available')


def print_tasks() -> None:
    for task, (_, extra) in NEEDS.items():
        lacks, fix = missing(task), install_command(extra)
        print(f'{task}: ' + (f'{", ".join(lacks)} missing; {fix}' if lacks else 'ready'))
    try:
        importlib.import_module('aft_mm.registry')
        operators = importlib.import_module('aft_mm.hosts').selected_operators()
    except ImportError:
        return  # broken_imports reports it
    print(f'operators of mmcv: {operators}')


def print_data() -> None:
    folder = Path(os.environ.get('AFT_MM_DATA', 'data'))
    hint = ', which does not exist; set AFT_MM_DATA to the folder that holds the data sets'
    print(f'data: {folder.absolute()}' + ('' if folder.is_dir() else hint))
    names = {
        name
        for path in (install_root() / 'configs').rglob('*.py')
        if path.parent.name != 'own_data'
        for name in DATA.findall(path.read_text(encoding='utf-8'))
    }
    for word, exists in (('found', True), ('missing', False)):
        listed = [name for name in sorted(names) if (folder / name).exists() == exists]
        if listed:
            print(f'{word}: {", ".join(listed)}')


def check_kernels(ops: list[str]) -> None:
    kernel_check = importlib.import_module('aft_mm.ops.kernel_check')
    device = 'cpu' if os.environ.get('TRITON_INTERPRET') == '1' else 'cuda'
    try:
        right = kernel_check.check_kernels(ops, device)
    except (ValueError, RuntimeError) as error:
        raise SystemExit(f'Error: {error}') from None
    if not right:
        raise SystemExit(1)


def run(args: argparse.Namespace) -> None:
    if args.kernels is not None:
        check_kernels(args.kernels)
        return
    versions = installed()
    needed, built_for = own_requirements(), torch_requirement()
    faults = list(problems(versions, platform.python_version(), needed, built_for))
    faults += broken_imports()
    faults += wrong_settings()
    for problem, fix in faults:
        print(f'wrong: {problem}; to do: {fix}')
    if not faults:
        print('fine: all that a training imports is here and fits together')
    print(f'\naft_mm {__version__}, Python {platform.python_version()}, {platform.platform()}')
    names = [*SHOWN, *(name for names in SAME_MODULES.values() for name in names)]
    print(', '.join(f'{name} {versions[name]}' for name in names if name in versions))
    print(f'installed in {sys.prefix}\n')
    if 'torch' in sys.modules:
        print_devices()
    print_tasks()
    with suppress(UserError):  # of wrong_settings
        print_data()
    if args.backends:
        with user_errors(ValueError, ImportError, OSError):
            print()
            importlib.import_module('aft_mm.ops.table').print_table()
    if faults:
        raise SystemExit(1)
