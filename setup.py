"""The parts of the build that pyproject.toml cannot express: aft_mm/.mim, C++ loops, description.

OpenMMLab's packages have configs/, tools/ and model-index.yml in .mim, so that `mim train aft_mm
CONFIG` finds them. An editable installation gets links to those of the checkout.

The loops (aft_mm/ops/native) are built on Linux, once for each set of instructions. They are called
by address and depend neither on Python nor on torch, so one wheel is for every version of both.
Elsewhere, and without a C++ compiler, they are left out with a warning: composite torch operations
are used, and the wheel is tagged py3-none-any. AFT-conv for ONNX Runtime is a library of its own.
"""

import hashlib
import platform
import re
import shutil
import sys
import tomllib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
CARRIED = ('configs', 'tools', 'model-index.yml')
LOOPS = Path('aft_mm/ops/native')
SOURCES = sorted([*LOOPS.glob('*.cpp'), *LOOPS.glob('*.h')])
OPERATOR = LOOPS / 'onnx_operator.cpp'  # for ONNX Runtime, a library of its own
EXTENSION = LOOPS / 'openvino_operator.cpp'  # `aft_mm export` builds it
# aft_mm.ops.native loads the library whose name has the digest of these sources.
DIGEST = hashlib.sha256(b''.join(path.read_bytes() for path in SOURCES)).hexdigest()[:12]
FLAGS = ['-std=c++17', '-O3', '-g0', '-ffp-contract=fast', '-fvisibility=hidden']
KINDS = {
    'loops': [
        path for path in SOURCES if path.suffix == '.cpp' and path not in (OPERATOR, EXTENSION)
    ],
    'operator': [OPERATOR],
}
# The loops use the OpenMP library that torch has loaded, so they share its threads; the operator uses
# the threads of ONNX Runtime.
FLAGS_OF = {'loops': ['-fopenmp'], 'operator': []}
INSTRUCTIONS = {'any': []}
if platform.machine() in ('x86_64', 'AMD64'):
    INSTRUCTIONS['avx2'] = ['-mavx2', '-mfma']
    avx512 = ['-mavx512f', '-mavx512bw', '-mavx512vl', '-mavx512dq']
    INSTRUCTIONS['avx512'] = [*INSTRUCTIONS['avx2'], *avx512]


class BuildWithMim(build_py):
    """Adds CARRIED to the build folder; a checkout gets links."""

    def run(self):
        super().run()
        editable = self.editable_mode
        target = (ROOT if editable else Path(self.build_lib)) / 'aft_mm/.mim'
        if not editable:
            shutil.rmtree(target, ignore_errors=True)  # of an older build
        target.mkdir(parents=True, exist_ok=True)
        for name in CARRIED:
            place, source = target / name, ROOT / name
            if editable:
                place.unlink(missing_ok=True)
                place.symlink_to(Path('../..') / name)
            elif source.is_dir():
                shutil.copytree(source, place, ignore=shutil.ignore_patterns('__pycache__'))
            else:
                shutil.copy2(source, place)

    def get_outputs(self, include_bytecode=True):
        added = Path(self.build_lib) / 'aft_mm/.mim'
        return [
            *super().get_outputs(include_bytecode),
            *(str(path) for path in added.rglob('*') if path.is_file()),
        ]


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_intact(library):
    """Return whether the library has the hash next to it."""
    expected = Path(f'{library}.sha256')
    return expected.exists() and expected.read_text().strip() == sha256(library)


class BuildLoops(build_ext):
    """Builds shared libraries that are not Python modules."""

    def run(self):
        for folder in (Path(self.build_lib) / LOOPS, ROOT / LOOPS):
            for path in (path for kind in KINDS for path in folder.glob(f'{kind}.*.so*')):
                # Of older sources, or damaged: a newer file would not be overwritten.
                if DIGEST not in path.name or path.suffix == '.so' and not is_intact(path):
                    path.unlink()
        super().run()

    def build_extension(self, ext):
        temporary = self.build_temp
        self.build_temp = str(
            Path(temporary) / ext.name
        )  # object files have the same names in all builds
        try:
            super().build_extension(ext)
        finally:
            self.build_temp = temporary
        self.write_hash(ext)

    def copy_extensions_to_source(self):
        super().copy_extensions_to_source()
        for ext in self.extensions:
            self.write_hash(ext)

    def write_hash(self, ext):
        """Write the sha256 of the library next to it; a library without it is not loaded."""
        library = Path(self.get_ext_fullpath(ext.name))
        if library.exists():  # it is optional
            Path(f'{library}.sha256').write_text(f'{sha256(library)}\n')

    def get_outputs(self):
        return [*super().get_outputs(), *(f'{path}.sha256' for path in super().get_outputs())]

    def get_ext_filename(self, fullname):
        *folders, name = fullname.split('.')
        return str(
            Path(*folders, f'{name.replace("_", ".")}.so')
        )  # not a module name that Python could import


class WheelForEveryPython(bdist_wheel):
    """Tags a wheel py3-none-PLATFORM if it has loops, else py3-none-any."""

    def run(self):
        super().run()
        if self.root_is_pure:
            self.warn('without the C++ loops, AFT-conv and AFT-simple are several times slower')

    def get_tag(self):
        libraries = self.get_finalized_command('build_ext').get_outputs()
        self.root_is_pure = not any(Path(library).exists() for library in libraries)
        return 'py3', 'none', super().get_tag()[2]


def loops():
    """Return the extensions of each kind, one for each set of instructions."""
    return [
        Extension(
            f'aft_mm.ops.native.{kind}_{name}_{DIGEST}',
            list(map(str, sources)),
            depends=['setup.py', *(str(path) for path in SOURCES if path.suffix == '.h')],
            language='c++',
            optional=True,
            extra_compile_args=[*FLAGS, *FLAGS_OF[kind], *flags],
        )
        for kind, sources in KINDS.items()
        for name, flags in INSTRUCTIONS.items()
    ]


def description():
    """Return the README with addresses in place of relative links, for a package page.

    The links are to the tag of the version, or to the branch main for a development version.
    """
    source = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['urls']['Source']
    code = (ROOT / 'aft_mm/__init__.py').read_text()
    version = re.search("__version__ = '(.+)'", code).group(1)
    tag = 'main' if 'dev' in version else f'v{version}'
    return re.sub(
        r'(!?)(\[[^]]*\])\((?!https?:|#)([^)]+)\)',
        lambda link: f'{link[1]}{link[2]}({source}/{"raw" if link[1] else "blob"}/{tag}/{link[3]})',
        (ROOT / 'README.md').read_text(encoding='utf-8'),
    )


setup(
    cmdclass=dict(build_py=BuildWithMim, build_ext=BuildLoops, bdist_wheel=WheelForEveryPython),
    ext_modules=loops() if sys.platform == 'linux' else [],
    long_description=description(),
    long_description_content_type='text/markdown',
)
