"""Runs the CUDA C++ kernels on a CPU, compiled by g++ with `emulation.h`; fixture `emulated`."""

import ctypes
import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from aft_mm.ops import dispatch
from aft_mm.ops.cuda import availability, nvrtc

KERNELS = {
    'conv_small': 'table forward backward exact_forward exact_backward',
    'conv_any': 'table units sums target_sums forward targets sources weight exact_forward '
    'exact_backward',
}
EMULATION = Path(__file__).parent / 'emulation.h'
# -O0 is compiled in half the time of -O1; pragmas of nvcc are unknown to g++.
COMMAND = 'g++ -x c++ -std=c++17 -O0 -fPIC -shared -w -march=native -ffp-contract=off'.split()


class Emulator:
    """Stands for `nvrtc.launch`; keeps the names of the kernels that ran."""

    def __init__(self, folder):
        self.folder, self.launched = folder, []

    def library(self, name, macros):
        exports = ''.join(f'EXPORT(conv_{kernel}_kernel)\n' for kernel in KERNELS[name].split())
        text = f'#include "{EMULATION}"\n#include "{nvrtc.FOLDER / name}.cu"\n{exports}'
        options = [f'-D{macro}={value}' for macro, value in macros]
        digest = hashlib.sha256(repr((text, options)).encode()).hexdigest()[:16]
        path = self.folder / f'{digest}.so'
        if not path.exists():
            source = path.with_suffix('.cpp')
            source.write_text(text)
            subprocess.run([*COMMAND, *options, source, '-o', path], check=True)
        return ctypes.CDLL(str(path))

    def launch(self, name, macros, kernel, grid, threads, arguments, index):
        self.launched.append(kernel.removeprefix('conv_').removesuffix('_kernel'))
        function = getattr(self.library(name, macros), f'run_{kernel}')
        function(ctypes.byref(arguments), *grid, threads)


@pytest.fixture(scope='session')
def emulation_folder(tmp_path_factory):
    return tmp_path_factory.mktemp('emulated')


@pytest.fixture
def emulated(monkeypatch, emulation_folder):
    """Select the cuda backend for tensors of the CPU."""
    if shutil.which('g++') is None:
        pytest.skip('g++ is not installed')
    emulator = Emulator(emulation_folder)
    monkeypatch.setattr(nvrtc, 'launch', emulator.launch)
    monkeypatch.setattr(nvrtc, 'failure', lambda *form: '')
    monkeypatch.setattr(availability, 'machine_reasons', lambda kind, index: ())
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, 'cuda')
    torch.use_deterministic_algorithms(True)  # new memory holds NaN
    yield emulator
    torch.use_deterministic_algorithms(False)
