"""Numbers of runs, and numbers as the documents show them."""

import itertools
import re
import statistics
from decimal import ROUND_HALF_UP, Decimal

from aft_mm.analysis.run_files import read_lines, selected
from aft_mm.analysis.verdicts import difference, mean_interval

from ..documents import ROOT, text_of

RESULTS = ROOT / 'docs/results'
FILES = sorted(RESULTS.rglob('runs.jsonl'))
NUMBER = re.compile(r'(?<![\w.])[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?!\w)')
REPRODUCTION, MIXERS = 'docs/reproduction', 'docs/mixer_comparison.md'
SPEECH = 'configs/speech_recognition/README.md'
BITS, TOP1, WORDS = 'bits_per_token', 'accuracy/top1', 'word_error_rate'


def runs(folder, pattern):
    """Return the runs of a folder of docs/results, by seed."""
    found = selected(f'{RESULTS}/{folder}/runs.jsonl:{pattern}').values()
    return sorted(found, key=lambda run: run.get('seed', 0))


def values(folder, pattern, metric):
    return [run['metrics'][metric] for run in runs(folder, pattern)]


def mean_and_half(numbers):
    interval = mean_interval(numbers)
    half = () if interval is None else ((interval[1] - interval[0]) / 2,)
    return [statistics.mean(numbers), *half]


def reprinted(text, numbers):
    """Return the text with its numbers replaced, in their format."""
    rest = iter(numbers)

    def replace(found):
        old = found.group()
        if 'e' in old:
            return f'{next(rest):.0e}'.replace('e-0', 'e-')
        sign = '+' if old.startswith('+') else ''
        comma = ',' if ',' in old else ''
        places = Decimal(1).scaleb(-len(old.partition('.')[2]))
        number = Decimal(repr(float(next(rest)))).quantize(places, ROUND_HALF_UP)
        new = f'{number:{sign}{comma}}'
        return new if set(new) - set('+-0.') else new.lstrip('-')

    text = NUMBER.sub(replace, text)
    assert not list(rest), f'{text} shows fewer numbers than {list(numbers)}'
    return text


def rows_of(page, header, index=0):
    """Return the rows of a table of a page, as lists of cells without emphasis."""
    lines = text_of(page).splitlines()
    begin = [number for number, line in enumerate(lines) if line.startswith(header)][index]
    found = itertools.takewhile(lambda line: line.startswith('|'), lines[begin + 2 :])
    plain = (re.sub(r'\*|\[([^\]]+)\]\([^)]+\)', r'\1', line) for line in found)
    return [[cell.strip().replace('−', '-') for cell in line[1:-1].split(' |')] for line in plain]


def entry(run, path):
    for key in path:
        run = run[key]
    return run


def milliseconds(folder):
    """Return the CPU time of a training iteration [ms] of each config of a comparison."""
    rows = read_lines(RESULTS / 'iterations.jsonl')[folder.rpartition('/')[2]]['rows']
    return {row['config']: row['milliseconds'] for row in rows}


class Claim:
    """Mean of a group, or of its difference from another group, for the sentences below."""

    def __init__(self, place, group, other=None, factor=1.0):
        folder, metric = place
        numbers = [factor * x for x in values(*split(folder, group), metric)]
        if other is None:
            self.mean, self.half = mean_and_half(numbers)
        else:
            found = difference(numbers, [factor * x for x in values(*split(folder, other), metric)])
            self.mean, self.p = found.mean, found.p
            self.half = (found.interval[1] - found.interval[0]) / 2
        self.size = abs(self.mean)


def holm(p):
    """Return the p values of a family, by name, after Holm's correction."""
    corrected, largest = {}, 0.0
    for place, name in enumerate(sorted(p, key=p.get)):
        largest = corrected[name] = max(largest, min(1.0, (len(p) - place) * p[name]))
    return corrected


def split(folder, pattern):
    other, _, name = pattern.rpartition(':')
    return other or folder, name


IMAGENETTE, CIFAR10 = ('imagenette', TOP1), ('cifar10_full', TOP1)
LONGER = 'cifar10_full_28_epochs', TOP1
MNIST, TEXT = ('mnist_six_minutes', 'bits_per_dim'), ('enwik8_grid', 'bits_per_char')
CLAIMS, CLAIMS_IMAGES = ('claims', 'bits_per_char'), ('claims', TOP1)
COPY = 'copy_task', BITS
RECALL, LISTOPS = (('synthetic_tasks/mqar', BITS), ('synthetic_tasks/listops', BITS))
LISTOPS_HITS = 'synthetic_tasks/listops', 'percent_correct_tokens'
PATHS = 'synthetic_tasks/pathfinder', TOP1
CELLS, STREETS = 'bccd_48_epochs', ('camvid', 'mIoU')
AN4, AN4_WORDS = ('an4', WORDS), ('an4', f'lexicon/{WORDS}')
CONV, SOFTMAX = 'aft-conv-*_seed?', 'transformer-*_seed?'
PEAK = 'enwik8_peak:aft-conv-*'
