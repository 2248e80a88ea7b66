"""Check that a tag may be released: check_tag.py TAG [SOURCE]

TAG must be v and the version of the package and of CITATION.cff. The first section of CHANGELOG.md
must be of this version, with the date that CITATION.cff gives. The links on the package page
must be below SOURCE, the address of the repository, and no placeholder of it may be left.
"""

import re
import sys
import tomllib
from pathlib import Path

from source_address import FILES, PLACEHOLDER, source_of


def check(root: Path, tag: str, source: str = '') -> None:
    """Raise ValueError if the files below root do not match the tag or the address."""
    code = (root / 'aft_mm/__init__.py').read_text(encoding='utf-8')
    version = re.search("__version__ = '(.+)'", code)[1]
    if tag != f'v{version}' or not re.fullmatch(r'\d+[.]\d+[.]\d+', version):
        raise ValueError(
            f'TAG must be v and the version MAJOR.MINOR.PATCH of aft_mm/__init__.py, got {tag} '
            f'and {version}'
        )
    citation = (root / 'CITATION.cff').read_text(encoding='utf-8')
    cited = dict(re.findall('^(version|date-released): (.+)$', citation, re.M))
    if cited.get('version') != version:
        raise ValueError(f'version of CITATION.cff must be {version}, got {cited.get("version")}')
    log = (root / 'CHANGELOG.md').read_text(encoding='utf-8')
    section = re.search('^## (.+)$', log, re.M)[1]
    date = cited.get('date-released')
    if not date or section != f'{version} ({date})':
        raise ValueError(
            f'the first section of CHANGELOG.md must be {version} (YYYY-MM-DD) with the '
            f'date-released of CITATION.cff, got {section} and {date}'
        )
    for name in FILES:
        if PLACEHOLDER in (root / name).read_text(encoding='utf-8'):
            raise ValueError(
                f'{name} must have the address of the repository, got {PLACEHOLDER}; '
                '`make source SOURCE=https://HOST/OWNER/NAME` sets it'
            )
    source = source or source_of(root)
    urls = tomllib.loads((root / 'pyproject.toml').read_text(encoding='utf-8'))['project']['urls']
    for name, address in urls.items():
        if f'{address}/'.removeprefix(f'{source}/') == f'{address}/':
            raise ValueError(f'{name} of [project.urls] must be below {source}, got {address}')


if __name__ == '__main__':
    try:
        check(Path(__file__).parents[1], *sys.argv[1:])
    except ValueError as error:
        sys.exit(str(error))
