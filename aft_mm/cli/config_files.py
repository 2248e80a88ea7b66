"""The configs that come with aft_mm, in a checkout and in an installed package."""

import os
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from aft_mm.errors import UserError

PACKAGE = Path(__file__).parents[1]
INDEX = 'model-index.yml'


@cache
def home() -> Path:
    """The folder that holds configs/, tools/ and model-index.yml.

    Of a checkout it is its root, of an installed package ``aft_mm/.mim``, where OpenMMLab's
    packages have theirs.

    Raises:
        UserError: they did not come with the package.
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
    """Every config of ours that is no base, by its name without .py."""
    folder = home() / 'configs'
    return {
        path.stem: path
        for path in sorted(folder.rglob('*.py'))
        if '_base_' not in path.relative_to(folder).parts
    }


def find_config(name: str) -> str:
    """The path of a config: ``name`` itself where it is a file, or one of ours that it names.

    Ours are named with or without their folder and .py.

    Raises:
        UserError: there is no such config, or it is not a Python file.
    """
    if not os.path.isfile(name):
        bare = Path(name).name.removesuffix('.py')
        ours = configs_by_name().get(bare)
        # A path has to be that of ours as far as it is given.
        if ours is None or not ours.with_suffix('').as_posix().endswith(
            '/' + Path(name).as_posix().removesuffix('.py')
        ):
            close = get_close_matches(bare, configs_by_name(), n=3)
            raise UserError(
                f'config {name!r} does not exist'
                + (f'; did you mean {" or ".join(close)}?' if close else '')
            )
        return str(ours)
    # Configs of YAML and JSON are not read: mmengine's way runs what the tags of YAML name, and a
    # file that looks like data should be data.
    if os.path.splitext(name)[1] != '.py':
        raise UserError(
            f'config {name!r} must be a Python file, whose name ends in .py; others are not read'
        )
    return name
