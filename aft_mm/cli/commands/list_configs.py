import argparse
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from typing import Any

import yaml

from aft_mm.cli.arguments import refuse_given
from aft_mm.config.finding import (
    INDEX,
    configs_by_name,
    install_command,
    install_root,
    trained_models,
)
from aft_mm.errors import UserError, user_errors

#: Further requirements of each folder of configs: modules, and their extra.
NEEDS: dict[str, tuple[tuple[str, ...], str]] = {
    'detection': (('mmdet',), 'downstream'),
    'segmentation': (('mmseg',), 'downstream'),
    'machine_translation': (('sentencepiece', 'sacrebleu'), 'text'),
    'super_resolution': (('torchmetrics',), 'quality'),
    'speech_recognition': (('soundfile', 'kaldi_native_io', 'jiwer'), 'speech'),
}
CONFIG_HEADER: tuple[str, ...] = ('config', 'task', 'measured', 'trained', 'libraries')
MIXER_HEADER: tuple[str, ...] = ('mixer', 'package', 'description')


def missing(task: str) -> list[str]:
    modules = NEEDS.get(task, ((), ''))[0]
    return [name for name in modules if not is_installed(name)]


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def measured() -> dict[str, dict[str, Any]]:
    """Return the measured results of every config by name, without those of papers."""
    root, results = install_root(), {}
    loader = getattr(yaml, 'CSafeLoader', yaml.SafeLoader)  # in C

    def read(name: str) -> dict[str, Any]:
        content: dict[str, Any] = yaml.load((root / name).read_text(encoding='utf-8'), loader)
        return content

    for metafile in read(INDEX)['Import']:
        for model in read(metafile)['Models']:
            results[model['Name']] = {
                name: value
                for result in model.get('Results') or ()
                for name, value in (result.get('Metrics') or {}).items()
                if '(paper)' not in name
            }
    return results


def shell_pattern(args: argparse.Namespace) -> str:
    return args.pattern if any(sign in args.pattern for sign in '*?[') else f'*{args.pattern}*'


def rows(args: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    metrics = measured()
    trained = {model.config: short for short, model in trained_models().items()}
    pattern = shell_pattern(args)
    for name, path in sorted(configs_by_name().items()):
        task = path.parent.name
        short = trained.get(name, '')
        if not (fnmatch(name, pattern) or fnmatch(short, args.pattern)) or args.task not in (
            None,
            task,
        ):
            continue
        lacks, values = missing(task), metrics.get(name, {})
        if (args.measured and not values) or (args.ready and lacks):
            continue
        first = next((f'{key} {value}' for key, value in values.items()), '')
        state = 'installed'
        if lacks:
            state = f'{", ".join(lacks)} missing: {install_command(NEEDS[task][1])}'
        yield name, task, first, short, state


def mixers(args: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    base = importlib.import_module('aft_mm.layers').TokenMixer  # takes seconds
    registry = importlib.import_module('aft_mm.registry').MODELS
    for prefix, modules in (('', registry.parent.module_dict), ('aft_mm.', registry.module_dict)):
        for name, cls in sorted(modules.items()):
            if isinstance(cls, type) and issubclass(cls, base):
                if fnmatch(f'{prefix}{name}'.lower(), shell_pattern(args).lower()):
                    package = cls.__module__.partition('.')[0]
                    yield f'{prefix}{name}', package, (cls.__doc__ or '').partition('\n')[0]


def run(args: argparse.Namespace) -> None:
    with user_errors():
        if args.mixers:
            refuse_given(args, ('task', 'measured', 'ready'), 'must be left out with --mixers')
            header, selected = MIXER_HEADER, list(mixers(args))
        else:
            tasks = sorted({path.parent.name for path in configs_by_name().values()})
            if args.task not in (None, *tasks):
                raise UserError(f'--task must be one of {", ".join(tasks)}, got {args.task!r}')
            header, selected = CONFIG_HEADER, list(rows(args))
        if not selected:
            raise UserError(
                f'no {header[0]} matches all arguments; `aft_mm list` prints all configs and '
                '`aft_mm list --mixers` all mixers'
            )
    try:
        show(header, selected, args.names)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show(header: tuple[str, ...], selected: Sequence[tuple[str, ...]], names: bool) -> None:
    if names:
        print('\n'.join(name for name, *_ in selected))
        return
    table = [header, *selected]
    widths = [max(map(len, column)) for column in list(zip(*table, strict=True))[:-1]]
    for *cells, last in table:
        padded = (f'{cell:{width}}' for cell, width in zip(cells, widths, strict=True))
        print('  '.join([*padded, last]))
