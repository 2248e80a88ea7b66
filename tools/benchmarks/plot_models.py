"""Plot the speed of models relative to DeiT from JSON files of benchmark_models.py.

    python tools/benchmarks/plot_models.py RUN.json ... --png OUT.png

There is one group of bars per model size, image size and dtype, for eager models only. A Markdown
table with a row per AFT-conv and per other network is printed.
"""

import argparse
import json
from pathlib import Path


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('runs', type=Path, nargs='+', metavar='JSON')
    parser.add_argument('--png', type=Path, required=True, help='path of the picture')
    return parser.parse_args(arguments)


if __name__ == '__main__':
    parse_args()  # before the slow imports

import matplotlib

matplotlib.use('Agg')
from arguments import parse_name
from matplotlib import pyplot as plt


def groups(runs: list[dict]) -> dict[str, dict[str, float]]:
    """Return the speed over DeiT by group and model, in the order of the runs."""
    found: dict[str, dict[str, float]] = {}
    for row in (row for run in runs for row in run['rows']):
        if row['form'] != 'eager' or 'reason' in row:
            continue
        kind, arch, heads, kernel = parse_name(row['model'])
        names = dict(deit='DeiT', aft=f'AFT-conv h{heads} k{kernel}', rival=row['model'])
        label = names.get(kind, f'bound h{heads}')
        group = f'{arch}, {row["size"]} px\n{row["dtype"]}'
        if kind == 'deit' or 'speed_vs_deit' in row:
            found.setdefault(group, {})[label] = row.get('speed_vs_deit', 1.0)
    return found


def table(runs: list[dict]) -> list[str]:
    """Return the table, with a row per model that is neither a DeiT nor a bound."""
    lines = [
        "| model, px, type | over DeiT | bound over DeiT | over its bound | peak MiB, DeiT's |",
        '| --- | --- | --- | --- | --- |',
    ]
    for run in runs:
        rows = {
            (row['model'], row['size'], row['dtype']): row
            for row in run['rows']
            if row['form'] == 'eager'
        }
        for (name, *place), row in rows.items():
            kind, arch, *_ = parse_name(name)
            if kind not in ('aft', 'rival') or 'speed_vs_deit' not in row:
                continue
            bound = rows.get((name.replace('aft', 'bound'), *place), {}) if kind == 'aft' else {}
            speeds = (row['speed_vs_deit'], bound.get('speed_vs_deit'), row.get('speed_vs_bound'))
            cells = ['–' if speed is None else f'{speed:.2f}' for speed in speeds]
            peaks = row.get('peak_mib'), rows[f'deit-{arch}', *place].get('peak_mib')
            cells.append(', '.join('–' if peak is None else f'{peak:.0f}' for peak in peaks))
            lines.append(f'| {name}, {row["size"]}, {row["dtype"]} | {" | ".join(cells)} |')
    return lines


def plot(runs: list[dict], path: Path) -> None:
    found = groups(runs)
    labels = list(dict.fromkeys(label for bars in found.values() for label in bars))
    figure, axes = plt.subplots(figsize=(2 + 1.6 * len(found), 4.2), layout='constrained')
    for place, bars in enumerate(found.values()):
        width = 0.9 / len(bars)
        for i, (label, speed) in enumerate(bars.items()):
            left = place + (i - (len(bars) - 1) / 2) * width
            bar = axes.bar(left, speed, 0.92 * width, color=f'C{labels.index(label)}')
            axes.bar_label(bar, fmt='%.2f', fontsize=7)
    handles = [plt.Rectangle((0, 0), 1, 1, color=f'C{i}') for i in range(len(labels))]
    axes.legend(handles, labels, fontsize=8, ncols=min(4, len(labels)), loc='upper left')
    axes.set_xticks(range(len(found)), found)
    axes.axhline(1, color='black', linewidth=0.7)
    axes.set(ylabel='images per second over DeiT', title=runs[0]['environment']['device_name'])
    axes.set_ylim(top=1.25 * max(speed for bars in found.values() for speed in bars.values()))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    runs = [json.loads(path.read_text()) for path in args.runs]
    plot(runs, args.png)
    print('\n'.join(table(runs)))


if __name__ == '__main__':
    main()
