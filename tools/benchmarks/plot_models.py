"""Plot the speed of models relative to DeiT from JSON files of benchmark_models.py.

    python tools/benchmarks/plot_models.py RUN.json ... --png OUT.png

There is one group of bars per model size, image size and dtype, for eager models only. A Markdown
table is printed.

With `--by-side`, seconds and peak memory of an image are plotted over its side, and the table has
the slopes of their logarithms over that of the number of pixels. If runs share a model and a size,
the first one counts.
"""

import argparse
import json
from pathlib import Path


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('runs', type=Path, nargs='+', metavar='JSON')
    parser.add_argument('--png', type=Path, required=True, help='path of the picture')
    parser.add_argument(
        '--by-side', action='store_true', help='plot seconds and memory over the side of the image'
    )
    return parser.parse_args(arguments)


if __name__ == '__main__':
    parse_args()  # before the slow imports

import numpy as np
from arguments import parse_name
from matplotlib.patches import Rectangle

from aft_mm.visualization.figures import new_figure

# Title and unit, and function of a row and the batch.
COSTS = {
    'seconds': lambda row, batch: 1 / row['images_per_second'],
    'MiB': lambda row, batch: row['peak_mib'] / batch,
}


def groups(runs: list[dict]) -> dict[str, dict[str, float]]:
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
    figure = new_figure(2 + 1.6 * len(found), 4.2)
    axes = figure.subplots()
    for place, bars in enumerate(found.values()):
        width = 0.9 / len(bars)
        for i, (label, speed) in enumerate(bars.items()):
            left = place + (i - (len(bars) - 1) / 2) * width
            bar = axes.bar(left, speed, 0.92 * width, color=f'C{labels.index(label)}')
            axes.bar_label(bar, fmt='%.2f', fontsize=7)
    handles = [Rectangle((0, 0), 1, 1, color=f'C{i}') for i in range(len(labels))]
    axes.legend(handles, labels, fontsize=8, ncols=min(4, len(labels)), loc='upper left')
    axes.set_xticks(range(len(found)), found)
    axes.axhline(1, color='black', linewidth=0.7)
    axes.set(ylabel='images per second over DeiT', title=runs[0]['environment']['device_name'])
    axes.set_ylim(top=1.25 * max(speed for bars in found.values() for speed in bars.values()))
    figure.savefig(path, dpi=110)


def costs(runs: list[dict], unit: str) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for run in runs:
        batch = run['environment']['settings']['batch']
        for row in run['rows']:
            if row['form'] == 'eager' and 'reason' not in row:
                sides = found.setdefault(row['model'], {})
                sides.setdefault(row['size'], COSTS[unit](row, batch))
    return {model: dict(sorted(sides.items())) for model, sides in found.items()}


def slope(sides: dict[int, float]) -> float:
    return np.polyfit(2 * np.log(list(sides)), np.log(list(sides.values())), 1)[0]


def plot_sides(runs: list[dict], path: Path) -> None:
    figure = new_figure(9, 3.8, runs[0]['environment']['device_name'])
    axes = figure.subplots(1, 2)
    for ax, unit in zip(axes, COSTS, strict=True):
        for model, sides in costs(runs, unit).items():
            ax.plot(list(sides), list(sides.values()), 'o-', label=model)
        ticks = sorted({side for sides in costs(runs, unit).values() for side in sides})
        ax.set_xscale('log', base=2)
        ax.set_yscale('log')
        ax.set_xticks(ticks, ticks)
        ax.set(xlabel='side of the image, px', ylabel=f'{unit} per image')
        ax.grid(alpha=0.3)
    axes[1].legend(fontsize=8, loc='lower right')
    figure.savefig(path, dpi=110)


def side_table(runs: list[dict]) -> list[str]:
    seconds, mib = (costs(runs, unit) for unit in COSTS)
    sides = sorted({side for row in seconds.values() for side in row})
    head = ['model', *(f'{side} px, s, MiB' for side in sides), 'slope, s', 'slope, MiB']
    lines = [f'| {" | ".join(head)} |', f'|{" --- |" * len(head)}']
    for model, row in seconds.items():
        cells = [
            f'{row[side]:.3g}, {mib[model][side]:,.0f}' if side in row else '–' for side in sides
        ]
        slopes = [f'{slope(found):.2f}' if len(found) > 1 else '–' for found in (row, mib[model])]
        lines.append(f'| {" | ".join([model, *cells, *slopes])} |')
    return lines


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    runs = [json.loads(path.read_text()) for path in args.runs]
    if args.by_side:
        plot_sides(runs, args.png)
        print('\n'.join(side_table(runs)))
        return
    plot(runs, args.png)
    print('\n'.join(table(runs)))


if __name__ == '__main__':
    main()
