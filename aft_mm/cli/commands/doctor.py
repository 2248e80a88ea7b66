"""What a person would look at first where something does not work."""

import argparse
import importlib
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from aft_mm.cli.environment import SAME_MODULES, installed, own_requirements, problems
from aft_mm.config.finding import install_root
from aft_mm.errors import UserError

from ... import __version__
from .list_configs import NEEDS, is_installed, missing

#: Packages whose versions a bug report should name, beside those of SAME_MODULES.
SHOWN = ('torch', 'torchvision', 'torchaudio', 'triton', 'numpy', 'setuptools')
DATA = re.compile(r'\{\{\$AFT_MM_DATA:data\}\}/([\w.-]+)')


def print_versions(versions: dict[str, str]) -> None:
    """Python, the platform, and what there is of the packages that matter."""
    print(f'aft_mm {__version__}, Python {platform.python_version()}, {platform.platform()}')
    names = [*SHOWN, *(name for names in SAME_MODULES.values() for name in names)]
    print(', '.join(f'{name} {versions[name]}' for name in names if name in versions))


def broken_imports() -> Iterator[tuple[str, str]]:
    """Packages that are there and do not import, as torchvision does beside a foreign torch."""
    for name in ('torch', 'torchvision', 'mmengine', 'mmcv', 'mmpretrain'):
        if not is_installed(name):
            continue
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a package raises while it is imported
            reason = ' '.join(str(error).split())
            lacks = error.name if isinstance(error, ModuleNotFoundError) and error.name else ''
            package = SAME_MODULES.get(lacks, (lacks,))[0]
            yield (
                f'{name} cannot be imported ({type(error).__name__}: {reason:.200})',
                f'pip install {package or f"--force-reinstall --no-deps {name}"}',
            )


def print_devices() -> None:
    """Where tensors can be, and which backend serves which op there."""
    torch = importlib.import_module('torch')
    threads = torch.get_num_threads()
    print(
        f'cpu: {torch.backends.cpu.get_cpu_capability()}, {threads} threads '
        f'(OMP_NUM_THREADS={os.environ.get("OMP_NUM_THREADS", "not set")})'
    )
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        print(
            f'cuda:{index}: {found.name}, {found.total_memory / 2**30:.0f} GiB, sm_{found.major}'
            f'{found.minor}'
        )
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        print(
            f'cuda: none (torch is built for {built})'
            if built
            else 'cuda: none (torch is built for the CPU)'
        )
    if torch.backends.mps.is_available():
        print('mps: available')
    print()
    importlib.import_module('aft_mm.ops.table').print_table()


def print_tasks() -> None:
    """The tasks that need more than aft_mm does."""
    for task, (_, mend) in NEEDS.items():
        lacks = missing(task)
        print(f'{task}: ' + (f'{", ".join(lacks)} missing; {mend}' if lacks else 'ready'))


def print_data() -> None:
    """Which of the folders that configs read are there."""
    folder = Path(os.environ.get('AFT_MM_DATA', 'data'))
    print(
        f'data: {folder.absolute()}'
        + (
            ''
            if folder.is_dir()
            else ', which does not exist; set AFT_MM_DATA to the folder that holds the data sets'
        )
    )
    names = sorted(
        {
            name
            for path in (install_root() / 'configs').rglob('*.py')
            for name in DATA.findall(path.read_text(encoding='utf-8'))
        }
    )
    for word, there in (('there', True), ('not there', False)):
        found = [name for name in names if (folder / name).exists() == there]
        if found:
            print(f'{word}: {", ".join(found)}')


def main(args: argparse.Namespace) -> None:
    versions = installed()
    print_versions(versions)
    print(f'installed in {sys.prefix}\n')
    found = list(problems(versions, platform.python_version(), own_requirements()))
    found += broken_imports()
    if 'torch' in sys.modules:
        try:
            print_devices()
        except ValueError as error:  # the variable names a backend that there is not
            found.append((str(error), 'unset AFT_MM_BACKEND'))
        print()
    print_tasks()
    try:
        print_data()
    except UserError as error:
        found.append((str(error), 'pip install --force-reinstall --no-deps aft_mm'))
    print()
    for sentence, mend in found:
        print(f'- {sentence}\n  {mend}')
    if found:
        raise SystemExit(1)
    print('Nothing is wrong.')
