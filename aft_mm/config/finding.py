"""Find a config by its name, in a checkout and in an installed package.

Only the standard library is imported here, so that a mistyped name fails fast.
"""

import os
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from aft_mm.errors import UserError

PACKAGE = Path(__file__).parents[1]
INDEX = 'model-index.yml'


@cache
def install_root() -> Path:
    """Return the folder with configs/, tools/ and model-index.yml.

    That is the root of a checkout or, in an installed package, ``aft_mm/.mim`` as in OpenMMLab's
    packages.

    Raises:
        UserError: the package was installed without them.
    """
    for folder in (PACKAGE.parent, PACKAGE / '.mim'):
        if (folder / INDEX).is_file() and (folder / 'configs').is_dir():
            return folder
    raise UserError(
        f'the configs of aft_mm are in neither {str(PACKAGE.parent)!r} nor '
        f'{str(PACKAGE / ".mim")!r}; install aft_mm from a wheel that holds them'
    )


@cache
def configs_by_name() -> dict[str, Path]:
    """Return all configs of aft_mm except the bases, by name without .py."""
    folder = install_root() / 'configs'
    return {
        path.stem: path
        for path in sorted(folder.rglob('*.py'))
        if '_base_' not in path.relative_to(folder).parts
    }


def find_config(name: str) -> str:
    """Return the path of a config, given its path or the name of a config of aft_mm.

    A name may have the folder in front and .py at the end.

    Raises:
        UserError: there is no such config, or it is not a Python file.
    """
    if not os.path.isfile(name):
        bare = Path(name).name.removesuffix('.py')
        ours = configs_by_name().get(bare)
        # Folders in the name must match.
        if ours is None or not ours.with_suffix('').as_posix().endswith(
            '/' + Path(name).as_posix().removesuffix('.py')
        ):
            close = get_close_matches(bare, configs_by_name(), n=3)
            raise UserError(
                f'config {name!r} does not exist'
                + (f'; did you mean {" or ".join(close)}?' if close else '')
            )
        return str(ours)
    # YAML and JSON are refused: mmengine's YAML loader executes tags, and a file that looks like
    # data should be data.
    if os.path.splitext(name)[1] != '.py':
        raise UserError(f'config {name!r} must be a Python file whose name ends in .py')
    return name
