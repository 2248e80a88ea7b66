"""Which configs there are, what was measured of them and what they need."""

import argparse
import importlib.machinery
import importlib.util
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any

import yaml

from aft_mm.cli.config_files import INDEX, configs_by_name, home
from aft_mm.errors import UserError, one_sentence

#: What each folder of configs needs beside aft_mm itself: modules, and how they are installed.
NEEDS: dict[str, tuple[tuple[str, ...], str]] = {
    'detection': (('mmcv._ext', 'mmdet'), 'make downstream'),
    'segmentation': (('mmcv._ext', 'mmseg'), 'make downstream'),
    'machine_translation': (('sentencepiece', 'sacrebleu'), "pip install 'aft_mm[text]'"),
    'speech_recognition': (
        ('torchaudio', 'soundfile', 'kaldi_native_io', 'jiwer'),
        "pip install 'aft_mm[speech]'",
    ),
}


def missing(task: str) -> list[str]:
    """The modules that a task needs and that are not installed; none of them is imported."""
    modules = NEEDS.get(task, ((), ''))[0]
    return [name for name in modules if not is_installed(name)]


def is_installed(module: str) -> bool:
    """Whether a module or submodule can be found."""
    package, _, rest = module.partition('.')
    found = importlib.util.find_spec(package)
    if found is None or not rest:
        return found is not None
    finder = importlib.machinery.PathFinder
    return finder.find_spec(rest, list(found.submodule_search_locations or ())) is not None


def measured() -> dict[str, dict[str, Any]]:
    """What was measured here of every config, by its name; figures of a paper are left out."""
    index = home() / INDEX
    found = {}
    for metafile in yaml.safe_load(index.read_text(encoding='utf-8'))['Import']:
        models = yaml.safe_load((home() / metafile).read_text(encoding='utf-8'))['Models']
        for model in models:
            found[model['Name']] = {
                name: value
                for result in model.get('Results') or ()
                for name, value in (result.get('Metrics') or {}).items()
                if '(paper)' not in name
            }
    return found


def rows(args: argparse.Namespace) -> Iterator[tuple[str, str, str, str]]:
    """Name, task, what was measured and what is missing of every config that is asked for."""
    metrics = measured()
    pattern = args.pattern if any(sign in args.pattern for sign in '*?[') else f'*{args.pattern}*'
    for name, path in sorted(configs_by_name().items()):
        task = path.parent.name
        if not fnmatch(name, pattern) or args.task not in (None, task):
            continue
        lacks, values = missing(task), metrics.get(name, {})
        if (args.measured and not values) or (args.ready and lacks):
            continue
        first = next((f'{key} {value}' for key, value in values.items()), '')
        needs = f'{", ".join(lacks)}: {NEEDS[task][1]}' if lacks else 'ready'
        yield name, task, first, needs


def main(args: argparse.Namespace) -> None:
    with one_sentence():
        tasks = sorted({path.parent.name for path in configs_by_name().values()})
        if args.task not in (None, *tasks):
            raise UserError(f'--task must be one of {", ".join(tasks)}, got {args.task!r}')
        found = list(rows(args))
        if not found:
            raise UserError('no config is asked for by all of these; `aft_mm list` prints them all')
    if args.names:
        print('\n'.join(name for name, *_ in found))
        return
    table = [('config', 'task', 'measured here', 'needs'), *found]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    for *cells, last in table:
        padded = (f'{cell:{width}}' for cell, width in zip(cells, widths, strict=True))
        print('  '.join([*padded, last]))
