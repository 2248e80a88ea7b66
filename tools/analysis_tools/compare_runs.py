"""Refill the tables of a paper from runs: configs by metrics, parameters, FLOPs and speed.

    python tools/analysis_tools/compare_runs.py AFT=work_dirs/aft DeiT=work_dirs/deit --out a.tex
    python tools/analysis_tools/compare_runs.py --group AFT aft_seed0 aft_seed1 --group DeiT
        deit_seed0 deit_seed1 --metric accuracy/top1 --out table.md table.csv

A metric is that of the last validation, a time the median of the log's, for one process: compare
times only of runs on one machine. FLOPs are those of model_complexity.py.
"""

import argparse
import contextlib
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from aft_mm.cli.arguments import add_runs, check_output
from aft_mm.errors import UserError, user_errors


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_runs(parser, 'work dir')
    parser.add_argument(
        '--metric',
        action='append',
        metavar='NAME',
        help='a validated metric, given once for each; by default all there are',
    )
    parser.add_argument(
        '--out', nargs='+', default=[], metavar='FILE', help='.md, .csv or .tex, also several'
    )
    return parser.parse_intermixed_args(argv)


if __name__ == '__main__':
    parse_args()  # --help and a wrong argument end before the slow imports

from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from model_complexity import analyse_config
from plot_curves import runs_of

from aft_mm.config.reading import read_config
from aft_mm.errors import CONFIG_ERRORS
from aft_mm.visualization import (
    TABLES,
    metric_label,
    read_scalars,
    run_table,
    trained,
    validated_metrics,
    validations,
)

# What two seeds of one config may differ in.
RUN_ONLY = ('work_dir', 'randomness', 'resume', 'load_from', 'launcher', 'experiment_name')


def config_of(work_dir: str) -> str:
    """The file that the latest training of a work dir wrote its whole config to.

    Raises:
        UserError: there is none.
    """
    found = sorted(Path(work_dir).glob('*/vis_data/scalars.json'))
    path = found[-1].with_name('config.py') if found else None
    if path is None or not path.is_file():
        raise UserError(
            f'{work_dir!r} is no work dir of a training: it has no '
            '*/vis_data/scalars.json with a config.py beside'
        )
    return str(path)


def same_but_for_the_seed(label: str, paths: Sequence[str]) -> Config:
    """The config that runs have in common.

    Raises:
        UserError: they differ in more than the seed.
    """
    configs = [read_config(path) for path in paths]
    for config in configs[1:]:
        different = [
            key
            for key in dict.fromkeys([*configs[0], *config])
            if key not in RUN_ONLY and configs[0].get(key) != config.get(key)
        ]
        if different:
            raise UserError(
                f'--group {label} needs runs that differ by their seed only, but they '
                f'differ in {", ".join(different)}'
            )
    return configs[0]


def costs(label: str, path: str, config: Config) -> dict[str, list[float]]:
    """Parameters and FLOPs; what cannot be counted is said on stderr and left out."""
    try:
        counted = analyse_config(path)
    except UserError as error:
        print(f'FLOPs of {label!r} are left out: {error}', file=sys.stderr)
        init_default_scope(config.get('default_scope', 'mmengine'))
        model = MODELS.build(config.model)
        return {'parameters [M]': [sum(p.numel() for p in model.parameters()) / 1e6]}
    if counted['uncounted']:
        print(f'FLOPs of {label!r} lack {", ".join(counted["uncounted"])}', file=sys.stderr)
    return {'parameters [M]': [counted['parameters'] / 1e6], 'FLOPs [G]': [counted['flops'] / 1e9]}


def row(
    label: str,
    work_dirs: Sequence[str],
    metrics: Sequence[str] | None,
) -> dict[str, list[float]]:
    """The columns of the runs behind a label.

    Raises:
        UserError: a work dir is none, the runs do not belong together, or one lacks a metric.
    """
    paths = [config_of(folder) for folder in work_dirs]
    config = same_but_for_the_seed(label, paths)
    logs = [read_scalars(folder) for folder in work_dirs]
    columns: dict[str, list[float]] = {}
    for folder, log in zip(work_dirs, logs, strict=True):
        for name in metrics or validated_metrics(log):
            points = validations(log, name)
            if not points and metrics:
                raise UserError(
                    f'{folder!r} was never validated in {name}, but in '
                    f'{", ".join(validated_metrics(log)) or "nothing"}'
                )
            columns.setdefault(metric_label(name), []).append(points[-1][1])
    columns |= costs(label, paths[0], config)
    times = [
        statistics.median(time for _, time in trained(log, 'time'))
        for log in logs
        if trained(log, 'time')
    ]
    batch = (config.get('train_dataloader') or {}).get('batch_size')
    if times:
        columns['s/iteration'] = times
    if times and batch:
        columns['samples/s'] = [batch / time for time in times]
    return columns


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)

    # What mmengine has to say on the way is no part of the table.
    with user_errors(*CONFIG_ERRORS), contextlib.redirect_stdout(sys.stderr):
        for path in args.out:
            check_output('--out', path, TABLES)
        rows = {
            label: row(label, work_dirs, args.metric) for label, work_dirs in runs_of(args).items()
        }
        # What every run has comes last, also where the first run has fewer metrics.
        last = ('parameters [M]', 'FLOPs [G]', 's/iteration', 'samples/s')
        names = dict.fromkeys(name for columns in rows.values() for name in columns)
        order = [*(n for n in names if n not in last), *(n for n in last if n in names)]
        rows = {
            label: {name: columns.get(name, []) for name in order}
            for label, columns in rows.items()
        }
        for path in args.out:
            Path(path).write_text(run_table(rows, Path(path).suffix), encoding='utf-8')
    print(run_table(rows), end='')


if __name__ == '__main__':
    main()
