import argparse
import contextlib
import csv
import io
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from aft_mm.config.reading import read_config
from aft_mm.config.texts import type_name
from aft_mm.errors import CONFIG_ERRORS, UserError, user_errors
from aft_mm.outputs import check_output

from .model_complexity import analyse_config
from .plot_curves import metric_label, runs_of
from .run_files import is_selection, read_runs
from .run_logs import decimals_of, mean_and_error, trained, validated_metrics, validations

TABLES = ('.md', '.csv', '.tex')
MISSING = '–'
_LATEX = {
    '\\': r'\textbackslash{}',
    '~': r'\textasciitilde{}',
    '^': r'\textasciicircum{}',
    **{character: f'\\{character}' for character in '&%$#_{}'},
}

Runs = Mapping[str, Mapping[str, Sequence[float]]]


def run_table(runs: Runs, kind: str = '.md') -> str:
    """Return a table of mean ± standard error, a row per name and a column per metric.

    Args:
        runs: Row name to its columns, each a list of values, one per seed.
        kind: '.md', '.csv' or '.tex' (for the package booktabs).
    """
    columns = list(dict.fromkeys(column for values in runs.values() for column in values))
    numbers = {
        name: [
            mean_and_error(values[column]) if values.get(column) else (None, None)
            for column in columns
        ]
        for name, values in runs.items()
    }
    if kind == '.csv':
        return _csv(columns, numbers)
    digits = [
        decimals_of([error for _, error in column], [mean for mean, _ in column if mean])
        for column in zip(*numbers.values(), strict=True)
    ]
    between = ' ± ' if kind == '.md' else r' \pm '
    rows = []
    for name, row in numbers.items():
        pairs = zip(row, digits, strict=True)
        cells = (_cell(mean, error, places, between) for (mean, error), places in pairs)
        rows.append([name, *cells])
    return (_markdown if kind == '.md' else _latex)(['run', *columns], rows)


def _cell(mean: float | None, error: float | None, places: int, between: str) -> str:
    if mean is None:
        return MISSING
    return f'{mean:.{places}f}' + ('' if error is None else f'{between}{error:.{places}f}')


def _csv(columns: Sequence[str], numbers: Mapping[str, Sequence[tuple]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator='\n')
    known = [any(row[i][1] is not None for row in numbers.values()) for i in range(len(columns))]
    header = [(column, f'{column} standard error') for column in columns]
    for name, pairs in [('run', header), *numbers.items()]:
        cells = [x for pair, error in zip(pairs, known, strict=True) for x in pair[: 1 + error]]
        writer.writerow([name, *cells])
    return text.getvalue()


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ['---', *['---:'] * (len(header) - 1)], *rows]
    return ''.join(
        f'| {" | ".join(cell.replace("|", chr(92) + "|") for cell in line)} |\n' for line in lines
    )


def _latex(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    body = [
        [_escaped(name), *('--' if cell == MISSING else f'${cell}$' for cell in cells)]
        for name, *cells in rows
    ]
    lines = [
        rf'\begin{{tabular}}{{l{"r" * (len(header) - 1)}}}',
        r'\toprule',
        _latex_line(map(_escaped, header)),
        r'\midrule',
        *map(_latex_line, body),
        r'\bottomrule',
        r'\end{tabular}',
    ]
    return '\n'.join(lines) + '\n'


def _latex_line(cells: Iterable[str]) -> str:
    return ' & '.join(cells) + r' \\'


def _escaped(text: str) -> str:
    return re.sub('|'.join(map(re.escape, _LATEX)), lambda match: _LATEX[match.group()], text)


# Runs of one group may differ in these.
RUN_ONLY = ('work_dir', 'randomness', 'resume', 'load_from', 'launcher', 'experiment_name')


def config_of(work_dir: str) -> str:
    logs = sorted(Path(work_dir).glob('*/vis_data/scalars.json'))
    path = logs[-1].with_name('config.py') if logs else None
    if path is None or not path.is_file():
        raise UserError(
            f'{work_dir!r} is not the work dir of a training: it has no '
            '*/vis_data/scalars.json with a config.py next to it'
        )
    return str(path)


def same_but_for_the_seed(label: str, paths: Sequence[str]) -> Config:
    configs = [read_config(path) for path in paths]
    for config in configs[1:]:
        different = [
            key
            for key in dict.fromkeys([*configs[0], *config])
            if key not in RUN_ONLY and configs[0].get(key) != config.get(key)
        ]
        if different:
            raise UserError(
                f'--group {label} must have runs that differ by their seed only, got a difference '
                f'in {", ".join(different)}'
            )
    return configs[0]


def costs(label: str, path: str, config: Config) -> dict[str, list[float]]:
    try:
        counted = analyse_config(path)
    except UserError as error:
        print(f'FLOPs of {label!r} are omitted: {error}', file=sys.stderr)
        init_default_scope(config.get('default_scope', 'mmengine'))
        model = MODELS.build(config.model)
        return {'parameters [M]': [sum(p.numel() for p in model.parameters()) / 1e6]}
    if counted['uncounted']:
        print(f'FLOPs of {label!r} exclude {", ".join(counted["uncounted"])}', file=sys.stderr)
    classifies = type_name(config.model.type).endswith('ImageClassifier')
    is_of_size = 'backbone' in config.model and not classifies
    size = f' at {" x ".join(map(str, counted["shape"][1:]))}' if is_of_size else ''
    return {
        'parameters [M]': [counted['parameters'] / 1e6],
        f'FLOPs [G]{size}': [counted['flops'] / 1e9],
    }


def row(
    label: str, work_dirs: Sequence[str], metrics: Sequence[str] | None
) -> dict[str, list[float]]:
    paths = [config_of(folder) for folder in work_dirs if not is_selection(folder)]
    config = same_but_for_the_seed(label, paths) if len(paths) == len(work_dirs) else Config()
    runs = read_runs(work_dirs)
    columns: dict[str, list[float]] = {}
    for folder, log in runs:
        for name in metrics or validated_metrics(log):
            points = validations(log, name)
            if not points and metrics:
                raise UserError(
                    f'--metric must be a validation metric of {folder!r} '
                    f'({", ".join(validated_metrics(log)) or "which has none"}), got {name}'
                )
            columns.setdefault(metric_label(name), []).append(points[-1][1])
    if config:
        columns |= costs(label, paths[0], config)
    times = [
        statistics.median(time for _, time in trained(log, 'time'))
        for _, log in runs
        if trained(log, 'time')
    ]
    loader = config.get('train_dataloader') or {}
    # Other batch samplers count tokens or vary the batch; the number of processes is not known.
    is_fixed = not loader.get('batch_sampler') and config.get('launcher', 'none') == 'none'
    batch = loader.get('batch_size') if is_fixed else None
    if times:
        columns['s/iteration'] = times
    if times and batch:
        columns['samples/s'] = [batch / time for time in times]
    return columns


def run(args: argparse.Namespace) -> None:
    # stdout is for the table.
    with user_errors(*CONFIG_ERRORS), contextlib.redirect_stdout(sys.stderr):
        for path in args.out:
            check_output('--out', path, TABLES)
        rows = {
            label: row(label, work_dirs, args.metric) for label, work_dirs in runs_of(args).items()
        }
        names = dict.fromkeys(name for columns in rows.values() for name in columns)
        flops = sorted(name for name in names if name.startswith('FLOPs [G]'))
        last = ('parameters [M]', *flops, 's/iteration', 'samples/s')
        order = [*(n for n in names if n not in last), *(n for n in last if n in names)]
        rows = {
            label: {name: columns.get(name, []) for name in order}
            for label, columns in rows.items()
        }
        for path in args.out:
            Path(path).write_text(run_table(rows, Path(path).suffix), encoding='utf-8')
    print(run_table(rows), end='')
