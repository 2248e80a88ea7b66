"""Check the files of a release: check_files.py FOLDER

The sdist and the wheels for every platform and for this one must be there, have the same Python
files, and differ in the C++ loops only, each of which must have its sha256 next to it. The wheel of
trained models must have the weights with the hashes that the others expect, and the SBOM the packages
of the sdist's lock.
"""

import hashlib
import json
import platform
import re
import sys
import tarfile
import zipfile
from pathlib import Path

INSTRUCTIONS = ('any', 'avx2', 'avx512') if platform.machine() == 'x86_64' else ('any',)
LIBRARIES = [f'{kind}.{name}' for kind in ('loops', 'operator') for name in INSTRUCTIONS]


def read_wheel(path: Path) -> dict[str, bytes]:
    """Return the files of a wheel by name, without its metadata."""
    with zipfile.ZipFile(path) as file:
        names = [name for name in file.namelist() if '.dist-info/' not in name and name[-1] != '/']
        return {name: file.read(name) for name in names}


def check(folder: Path) -> None:
    """Raise ValueError if a file is missing or wrong."""
    found = sorted(path.name for path in folder.iterdir())
    expected = (
        f'*-py3-none-manylinux*_{platform.machine()}.whl',
        'aft_mm-*-py3-none-any.whl',
        '*.tar.gz',
        'aft_mm_minis-*-py3-none-any.whl',
        'aft_mm-*.cdx.json',
    )
    paths = [next(folder.glob(pattern), None) for pattern in expected]
    if None in paths or len(found) != len(paths):
        raise ValueError(f'the files must be {", ".join(expected)}, got {", ".join(found)}')
    linux, pure = map(read_wheel, paths[:2])
    loops = {name: data for name, data in linux.items() if name.endswith('.so')}
    built = sorted('.'.join(name.split('/')[-1].split('.')[:2]) for name in loops)
    if built != LIBRARIES:
        raise ValueError(f'{paths[0].name} must have {", ".join(LIBRARIES)}, got {built}')
    for name, data in loops.items():
        if linux.get(f'{name}.sha256', b'').decode().strip() != hashlib.sha256(data).hexdigest():
            raise ValueError(f'{name} must have its sha256 next to it')
    others = {name for name in linux if not name.endswith(('.so', '.so.sha256'))}
    if different := sorted(others ^ pure.keys() or [n for n in others if linux[n] != pure[n]]):
        raise ValueError(f'the wheels must differ in the loops only, but also in {different[0]}')
    with tarfile.open(paths[2]) as file:
        sources = {name.partition('/')[2]: name for name in file.getnames()}
        lock = file.extractfile(sources['requirements/lock.txt']).read().decode()
    if missing := sorted(
        others - sources.keys() - {n for n in others if n.startswith('aft_mm/.mim/')}
    ):
        raise ValueError(f'{paths[2].name} must have every file of the wheels, not {missing[0]}')
    minis = read_wheel(paths[3])
    for name, data in pure.items():
        if name.endswith('/metafile.yml'):
            for file, digest in re.findall(r' mini://(\S+)#sha256=(\w+)$', data.decode(), re.M):
                weights = minis.get(f'aft_mm_minis/{file}', b'')
                if hashlib.sha256(weights).hexdigest() != digest:
                    raise ValueError(f'{paths[3].name} must have the {file} of {name}')
    sbom = json.loads(paths[4].read_text())
    listed = {(each['name'], each['version']) for each in sbom['components']}
    version = sbom['metadata']['component'].get('version')
    if different := sorted(listed ^ set(re.findall(r'^([\w.-]+)==([^ ;]+)', lock, re.M))):
        raise ValueError(f'{paths[4].name} must have the packages of the lock, not {different[0]}')
    if not version or paths[4].name != f'aft_mm-{version}.cdx.json':
        raise ValueError(f'{paths[4].name} must be of its version, got {version}')
    for name in found:
        print(f'{(folder / name).stat().st_size:>10}  {name}')


if __name__ == '__main__':
    try:
        check(Path(sys.argv[1]))
    except ValueError as error:
        sys.exit(str(error))
