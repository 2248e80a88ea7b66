"""Print the licence of every package of a lock that is installed here, as its metadata states it.

python requirements/licenses.py requirements/lock.txt [requirements/dev.txt ...]
"""

import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

CLASSIFIER = 'License :: '


def pins(path: str | Path) -> Iterator[Requirement]:
    """The pins of a lock file, without their hashes."""
    for line in Path(path).read_text().replace('\\\n', ' ').splitlines():
        yield Requirement(line.partition(' --hash=')[0].strip())


def first_line(package: Distribution) -> str:
    """Return the first line of its licence file, such as ``The MIT License``; empty if there is none."""
    for name in package.metadata.get_all('License-File', []):
        for text in (package.read_text(name), package.read_text(f'licenses/{name}')):
            if text and text.strip():
                return text.strip().splitlines()[0]
    return ''


def license_of(package: Distribution) -> str:
    """Return the licence that a package states: SPDX, else classifiers, else free text."""
    metadata = package.metadata
    stated = metadata.get('License-Expression')
    if not stated:
        classifiers = [
            text.rpartition(' :: ')[2]
            for text in metadata.get_all('Classifier', [])
            if text.startswith(CLASSIFIER) and text != 'License :: OSI Approved'
        ]
        stated = ' or '.join(classifiers) or metadata.get('License') or first_line(package)
    return ' '.join((stated or 'not stated').split())[:60]


def main(paths: Sequence[str]) -> None:
    names = sorted(
        {
            pin.name
            for path in paths
            for pin in pins(path)
            if pin.marker is None or pin.marker.evaluate()
        }
    )
    width = max(map(len, names))
    for name in names:
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue  # of a lock that is not installed, such as the one for mmdet
        print(f'{name:{width}}  {package.version:12}  {license_of(package)}')


if __name__ == '__main__':
    main(sys.argv[1:])
