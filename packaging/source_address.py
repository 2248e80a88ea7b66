"""Set the address of the repository: source_address.py ADDRESS

The address is Source of [project.urls]; the other places of FILES, which begin with it, follow.
"""

import re
import sys
import tomllib
from pathlib import Path

FILES = ('pyproject.toml', 'README.md', 'packaging/conda/recipe.yaml')
PLACEHOLDER = 'https://example.org/aft_mm'


def source_of(root: Path) -> str:
    text = (root / 'pyproject.toml').read_text(encoding='utf-8')
    return tomllib.loads(text)['project']['urls']['Source']


def replace(root: Path, new: str) -> None:
    """Write `new` for the address in the files below root.

    Raises:
        ValueError: It is no address of a repository.
    """
    if not re.fullmatch(r'https://[\w.-]+(/[\w.~-]+)+', new):
        raise ValueError(f'ADDRESS must be https://HOST/OWNER/NAME, got {new!r}')
    old = source_of(root)
    for name in FILES:
        path = root / name
        text = path.read_text(encoding='utf-8')
        path.write_text(re.sub(rf'{re.escape(old)}(?![\w.-])', new, text), encoding='utf-8')


if __name__ == '__main__':
    try:
        replace(Path(__file__).parents[1], *sys.argv[1:])
    except ValueError as error:
        sys.exit(str(error))
