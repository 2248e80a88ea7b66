"""Plot the accuracy of mixers on sequences of several lengths, means over seeds.

    python tools/benchmarks/plot_lengths.py 32=docs/results/synthetic_tasks/listops/runs.jsonl \\
        128=docs/results/synthetic_tasks/listops_128/runs.jsonl \\
        --metric percent_correct_tokens --out lengths.png
"""

from collections import defaultdict
from pathlib import Path

from matplotlib.ticker import NullLocator

from aft_mm.analysis.run_files import read_lines, seed_of
from aft_mm.analysis.run_logs import mean_and_error
from aft_mm.cli.arguments import tool_parser
from aft_mm.outputs import check_writable
from aft_mm.visualization.figures import new_figure

# Mixers by the first part of a config's name; controls are dashed.
MIXERS = {
    'aft-simple-mini': ('AFT-simple', 'C3-o'),
    'aft-conv-mini-h4-k31': ('AFT-conv', 'C1-o'),
    'transformer-mini': ('softmax attention, 1 head', 'C0-s'),
    'transformer-mini-h4': ('softmax attention, 4 heads', 'C9-s'),
    'linear-mini': ('linear attention', 'C2-^'),
    'lstm-l2-d50': ('LSTM', 'C4-D'),
    'depthwise-conv-mini-k31': ('depthwise convolution', 'C7--v'),
    'token-shift-mini': ('token shift', 'C8--v'),
}


def pair(text: str) -> tuple[int, Path]:
    length, _, file = text.partition('=')
    return int(length), Path(file)


def main() -> None:
    parser = tool_parser(__doc__)
    parser.add_argument(
        'runs', nargs='+', type=pair, metavar='LENGTH=FILE', help='runs of each length'
    )
    parser.add_argument('--metric', required=True, help='metric of the test')
    parser.add_argument('--out', required=True, help='picture')
    args = parser.parse_args()
    check_writable('--out', [args.out])
    files = dict(sorted(args.runs))
    values = defaultdict(list)
    for length, file in files.items():
        for name, run in read_lines(file).items():
            if seed_of(name) is not None and '-peak' not in name:  # another start of AFT-conv
                values[run['config'].partition('_')[0], length].append(run['metrics'][args.metric])

    figure = new_figure(6.4, 3.2)
    axes = figure.add_subplot()
    for mixer, (label, style) in MIXERS.items():
        lengths = [length for length in files if (mixer, length) in values]
        means, errors = zip(*(mean_and_error(values[mixer, x]) for x in lengths), strict=True)
        axes.errorbar(lengths, means, errors, fmt=style, ms=4, lw=1.5, capsize=2, label=label)
    axes.set(
        xscale='log', xlabel='longest sequence [tokens]', ylabel='accuracy [%]', ylim=(0, None)
    )
    axes.set_xticks([*files], [f'{length:,}' for length in files])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3)
    figure.legend(loc='outside right upper', frameon=False)
    figure.savefig(args.out, dpi=110)


if __name__ == '__main__':
    main()
