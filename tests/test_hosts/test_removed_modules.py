"""mmengine runs without ``pkg_resources`` (setuptools 82) and ``pkgutil.find_loader`` (Python 3.14)."""

import contextlib
import io
import subprocess
import sys

# Neither is importable, whatever this environment has.
WITHOUT_BOTH = """
import importlib.machinery, pkgutil, sys
find = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = lambda name, *rest: (
    None if name == 'pkg_resources' else find(name, *rest)
)
vars(pkgutil).pop('find_loader', None)
"""
LOOKED_UP = """
import aft_mm.registry, mmcv, mmengine
from mmengine.utils import get_installed_path, is_installed
from mmengine.utils.package_utils import package2module
from mmengine.utils.dl_utils.misc import mmcv_full_available
from mmcv.utils.ext_loader import check_ops_exist
from mmengine.hub import get_config

print(is_installed('mmpretrain'), is_installed('mmengine'), is_installed('nobody-has-this'))
print(get_installed_path('mmpretrain'), get_installed_path('mmcv'), package2module('mmcv-lite'))
print(mmcv_full_available(), check_ops_exist())
print(get_config('mmpretrain::resnet/resnet18_8xb32_in1k.py').model.backbone.type)
try:
    get_installed_path('nobody-has-this')
except Exception as error:
    print(type(error).__name__)
"""
ASKED_BY_PYTEST = """
import pkg_resources, pytest
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend('/')
print(pkg_resources.__file__)
"""


def test_packages_and_extensions_are_found_without_the_removed_modules():
    with contextlib.redirect_stdout(io.StringIO()) as with_both:
        exec(LOOKED_UP, {})
    command = [sys.executable, '-c', WITHOUT_BOTH + LOOKED_UP + ASKED_BY_PYTEST]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *lines, replacement = done.stdout.splitlines()
    assert lines[0] == 'True True False' and lines[2] == 'True True'
    # The exception has another name.
    assert lines[:-1] == with_both.getvalue().splitlines()[:-1]
    assert lines[-1] == 'PackageNotFoundError'
    assert replacement.endswith('hosts/pkg_resources.py')
