"""Plot the time per image against its side, each model in its fastest runtime.

The lines are those that ``benchmark_runtimes.py --json`` wrote, one run per side.
"""

import argparse
import json
from pathlib import Path

from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter, NullLocator

from aft_mm.outputs import check_writable
from aft_mm.visualization.figures import new_figure

MODELS = {
    'deit-tiny': ('DeiT-tiny', '#777777'),
    'convnext_femto': ('ConvNeXt-femto', '#1f6fb4'),
    'aft-tiny-h32-k11': ('AFT-conv tiny', '#c1440e'),
}
TYPES = {'float32': '-o', 'int8': '--s'}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('jsonl', help='runtimes_zen4.jsonl or a file like it')
    parser.add_argument('--runs', nargs='+', required=True, help='names of lines, one per side')
    parser.add_argument('--out', required=True, help='picture')
    args = parser.parse_args()
    check_writable('--out', [args.out])
    lines = {run['name']: run['rows'] for run in map(json.loads, Path(args.jsonl).open())}
    missing = [name for name in args.runs if name not in lines]
    if missing:
        parser.error(f'--runs must be lines of {args.jsonl!r}, got {" ".join(missing)}')
    times = {
        (row['best_of'], row['of'], row['size']): 1000 / row['images_per_second']
        for name in args.runs
        for row in lines[name]
        if 'best_of' in row
    }
    sides = sorted({side for _, _, side in times})

    figure = new_figure(5.2, 2.7)
    axes = figure.add_subplot()
    for model, (_, colour) in MODELS.items():
        for dtype, style in TYPES.items():
            milliseconds = [times[model, dtype, side] for side in sides]
            axes.plot(sides, milliseconds, style, color=colour, lw=1.8, ms=5)
    axes.set(xscale='log', yscale='log', xlabel='side of the image [px]')
    axes.set_ylabel('time per image, one core [ms]')
    axes.set_xticks(sides, [f'{side:,}' for side in sides])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter('{x:,.0f}')
    axes.grid(alpha=0.3)
    legend = [Line2D([], [], color=colour, lw=3, label=label) for label, colour in MODELS.values()]
    legend += [
        Line2D([], [], color='black', marker=style[-1], ls=style[:-1], ms=5, label=dtype)
        for dtype, style in TYPES.items()
    ]
    axes.legend(handles=legend, frameon=False)
    figure.savefig(args.out, dpi=200)


if __name__ == '__main__':
    main()
