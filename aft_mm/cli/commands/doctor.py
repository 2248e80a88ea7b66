"""``aft_mm doctor``: check the environment, and with --kernels the GPU kernels."""

import argparse
import importlib
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from aft_mm.config.finding import install_command, install_root
from aft_mm.errors import UserError, user_errors

from ... import __version__
from .list_configs import NEEDS, is_installed, missing

PYTHON = SpecifierSet('>=3.11,<3.14')
SAME_MODULES = {
    'mmengine': ('mmengine', 'onedl-mmengine'),
    'mmcv': ('mmcv-lite', 'mmcv', 'onedl-mmcv'),
    'mmpretrain': ('mmpretrain', 'onedl-mmpretrain'),
    'mmdet': ('mmdet', 'onedl-mmdetection'),
    'mmseg': ('mmsegmentation', 'onedl-mmsegmentation'),
    'cv2': (
        'opencv-python',
        'opencv-python-headless',
        'opencv-contrib-python',
        'opencv-contrib-python-headless',
    ),
}
#: mmcv and mmcv-lite have the same files, so one may be over the other.
OVER_EACH_OTHER = {'mmcv-lite', 'mmcv'}


def installed() -> dict[str, str]:
    return {canonicalize_name(one.name): one.version for one in distributions() if one.name}


def requirements_of(package: str) -> list[Requirement]:
    """Return the requirements without extras, [] if the package is not installed."""
    try:
        requirements = map(Requirement, requires(package) or ())
    except PackageNotFoundError:
        return []
    return [one for one in requirements if one.marker is None or one.marker.evaluate({'extra': ''})]


def problems(
    versions: Mapping[str, str],
    python: str,
    needed: Iterable[Requirement],
    built_for: Requirement | None,
) -> Iterator[tuple[str, str]]:
    """Yield problems of the environment, each with the command that fixes it."""
    if not PYTHON.contains(python):
        yield (
            f'Python {python} is not supported ({PYTHON})',
            'python3.13 -m venv .venv',
        )
    yield from _missing(versions, needed)
    yield from _twice(versions)
    yield from _torch_pairs(versions, built_for)


def _missing(
    versions: Mapping[str, str], needed: Iterable[Requirement]
) -> Iterator[tuple[str, str]]:
    for requirement in needed:
        name = canonicalize_name(requirement.name)
        # A fork or a compiled variant replaces a package.
        same = next((names for names in SAME_MODULES.values() if name in names), ())
        fix = f"pip install '{requirement.name}{requirement.specifier}'"
        there = [other for other in dict.fromkeys((name, *same)) if other in versions]
        if not there:
            yield f'{requirement.name} is missing', fix
        # Forks have versions of their own.
        for other in [other for other in there if not other.startswith('onedl-')]:
            if not requirement.specifier.contains(versions[other], prereleases=True):
                yield (
                    f'{other} is {versions[other]}, and aft_mm needs {requirement.specifier}',
                    fix if there == [name] else f'pip uninstall -y {" ".join(there)}; {fix}',
                )


def _twice(versions: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for module, names in SAME_MODULES.items():
        there = [name for name in names if name in versions]
        if len(there) > 1 and set(there) != OVER_EACH_OTHER:
            yield (
                f'{" and ".join(there)} are all installed and overwrite each other: all contain '
                f'the module {module}',
                f'pip uninstall -y {" ".join(there)}; pip install '
                f"'{there[0]}=={versions[there[0]]}'",
            )


def _torch_pairs(
    versions: Mapping[str, str], built_for: Requirement | None
) -> Iterator[tuple[str, str]]:
    if not {'torch', 'torchvision'} <= versions.keys():
        return
    torch, vision = Version(versions['torch']), Version(versions['torchvision'])
    if built_for is not None and not built_for.specifier.contains(torch, prereleases=True):
        yield (
            f'torchvision {vision} is built for torch {built_for.specifier}, got torch {torch}',
            f"pip install 'torch=={torch.public}' torchvision",
        )
    elif ('cpu' in (torch.local or '')) != ('cpu' in (vision.local or '')):
        yield (
            f'only one of torch {torch} and torchvision {vision} is a CPU-only build, so they '
            'cannot be imported together',
            'install both from the same index',
        )


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
    built_for = next((x for x in requirements_of('torchvision') if x.name == 'torch'), None)
    needed = requirements_of('aft_mm')
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
