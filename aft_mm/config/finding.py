"""Find a config by its name, with the standard library only, so that a mistyped name fails fast."""

import os
import re
import shlex
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import NamedTuple

from aft_mm.errors import UserError

PACKAGE = Path(__file__).parents[1]
INDEX = 'model-index.yml'


class TrainedModel(NamedTuple):
    config: str
    weights: str  # mini://NAME.safetensors#sha256=...


@cache
def install_root() -> Path:
    """Return the folder with configs/, tools/ and model-index.yml: a checkout or ``aft_mm/.mim``."""
    for folder in (PACKAGE.parent, PACKAGE / '.mim'):
        if (folder / INDEX).is_file() and (folder / 'configs').is_dir():
            return folder
    raise UserError(
        f'the configs of aft_mm are in neither {str(PACKAGE.parent)!r} nor '
        f'{str(PACKAGE / ".mim")!r}; install aft_mm from a wheel that holds them'
    )


@cache
def configs_by_name() -> dict[str, Path]:
    folder = install_root() / 'configs'
    return {
        path.stem: path
        for path in sorted(folder.rglob('*.py'))
        if '_base_' not in path.relative_to(folder).parts
    }


@cache
def trained_models() -> dict[str, TrainedModel]:
    """Return the models of aft_mm_minis by their short name, as the metafiles list them."""
    entry = re.compile(r'^  - Name: (\S+)\n    Weights: (mini://([\w-]+)\.\S+)$', re.M)
    return {
        name: TrainedModel(config, weights)
        for path in sorted(install_root().glob('configs/*/metafile.yml'))
        for config, weights, name in entry.findall(path.read_text(encoding='utf-8'))
    }


def own_weights(name: str) -> str | None:
    """Return the weights that aft_mm_minis has for the model of :func:`our_config`."""
    if name.endswith('.py') or os.path.isfile(name):  # may have another network
        return None
    name = our_config(name).stem
    models = trained_models().values()
    return next((model.weights for model in models if model.config == name), None)


def find_config(name: str) -> str:
    """Return the path of a config, given its path, its name or a part that only one config has."""
    if not os.path.isfile(name):
        return str(our_config(name))
    # mmengine's YAML loader executes tags.
    if os.path.splitext(name)[1] != '.py':
        raise UserError(f'config {name!r} must be a Python file whose name ends in .py')
    return name


def our_config(name: str) -> Path:
    """Return the config of aft_mm with this name or the only one with this part, or raise a UserError.

    A short name of :func:`trained_models` is that of its config.
    """
    if name in trained_models():
        name = trained_models()[name].config
    *folders, bare = Path(name).as_posix().removesuffix('.py').split('/')
    folder = '/'.join(folders).removeprefix('configs').strip('/')
    known = configs_by_name()
    matching = {other: path for other, path in known.items() if path.parent.name.startswith(folder)}
    if bare in matching:
        return matching[bare]
    # A name that ends in .py may be a missing file; of one that lacks it, the file is meant.
    own = [f'{name}.py'] if os.path.isfile(f'{name}.py') else []
    parts = [] if own or name.endswith('.py') else [other for other in matching if bare in other]
    parts.sort(key=lambda other: (not other.startswith(bare), other))
    if len(parts) == 1:
        return matching[parts[0]]
    close = own or parts or _files_like(name) or similar_names(bare, known)
    shown = f'{", ".join(close[:3])}{" …" if len(close) > 3 else ""}'
    if os.path.lexists(name):
        problem = 'must be a Python file, got a folder' if os.path.isdir(name) else 'is not a file'
        raise UserError(f'config {name!r} {problem}')
    if parts:
        raise UserError(f'config {name!r} must be part of one name, got {len(parts)}: {shown}')
    raise UserError(
        f'config {name!r} does not exist' + (f'; did you mean {shown}?' if close else '')
    )


def _files_like(name: str) -> list[str]:
    """Return the Python files next to a missing one, or in the folder of a name, that it may mean."""
    folder, file = os.path.split(name)
    if not folder and not name.endswith('.py'):
        return []
    others = [path.name for path in sorted(Path(folder).glob('*.py'))]
    close = get_close_matches(f'{file.removesuffix(".py")}.py', others, n=3)
    return [os.path.join(folder, other) for other in close]


def check_checkpoint(path: str | None) -> None:
    """Raise a UserError if ``path`` is neither a file nor an address."""
    if path is not None and '://' not in path and not os.path.isfile(os.path.expanduser(path)):
        exists = os.path.exists(os.path.expanduser(path))
        raise UserError(f'checkpoint {path!r} {"is not a file" if exists else "does not exist"}')


def similar_names(name: str, known: Collection[str]) -> list[str]:
    size = len(re.split('[-_]', name))
    parts: dict[str, str] = {}
    for other in known:
        words = re.split('[-_]', other)
        for first in range(max(1, len(words) - size + 1)):
            parts.setdefault('-'.join(words[first : first + size]), other)
    close = get_close_matches(name.replace('_', '-'), [*known, *parts], n=3)
    matches = [other for other in known if name in other] or [parts.get(one, one) for one in close]
    return list(dict.fromkeys(matches))


def find_base(name: str) -> str:
    name = name.partition('::')[2]
    path = install_root() / 'configs' / name
    return str(path if path.is_file() else our_config(name))


def install_command(extra: str) -> str:
    if extra == 'downstream' and (PACKAGE.parent / 'Makefile').is_file():
        return 'make downstream'
    try:
        lines: Sequence[str] = requires('aft_mm') or ()
    except PackageNotFoundError:
        lines = ()
    # Such as: mmdet<3.4,>=3.3; extra == "downstream"
    requirements = [
        line.partition(';')[0].strip()
        for line in lines
        if re.search(f"""extra == ["']{extra}["']""", line)
    ]
    return shlex.join(['pip', 'install', *(requirements or [f'aft_mm[{extra}]'])])
