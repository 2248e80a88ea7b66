"""Where results come from: code and machine of each line, and the sampling of the test sets."""

import json
import math
import subprocess

import pytest

from aft_mm.analysis.run_files import read_lines

from ..documents import text_of
from .shown import (
    CIFAR10,
    CONV,
    FILES,
    IMAGENETTE,
    LISTOPS_HITS,
    LONGER,
    PATHS,
    REPRODUCTION,
    RESULTS,
    ROOT,
    SOFTMAX,
    TOP1,
    Claim,
)

KNOWN = {'commit', 'versions', 'machine', 'loops'}
# Older than the recording of machines and loops.
OLD = {'warm_up'}


def git(*words):
    return subprocess.run(['git', *words], cwd=ROOT, capture_output=True, text=True).stdout.split()


def commits(content):
    if isinstance(content, dict):
        found = (content.get(key) for key in ('commit', 'added'))
        yield from (value for value in found if isinstance(value, str))
        content = content.values()
    if not isinstance(content, str | int | float | None):
        for value in content:
            yield from commits(value)


def test_a_line_names_its_code_and_machine_or_the_commit_that_added_it():
    for path in FILES:
        for name, run in read_lines(path).items():
            known = KNOWN - {'loops'} if path.parent.name in OLD else KNOWN
            assert known <= run.keys() or 'added' in run and not KNOWN & run.keys(), (path, name)


def test_commits_of_results_are_in_the_history():
    if not git('rev-parse', '--git-dir') or git('rev-parse', '--is-shallow-repository') == ['true']:
        pytest.skip('this copy has no history')
    history = git('rev-list', 'HEAD')
    known = {*history, *(commit[:8] for commit in history)}
    for path in (*RESULTS.rglob('*.jsonl'), *RESULTS.rglob('*.json')):
        text = path.read_text()
        found = map(json.loads, text.splitlines()) if path.suffix == '.jsonl' else json.loads(text)
        assert {commit.removesuffix('-dirty') for commit in commits(found)} <= known, path


def test_leads_with_the_sampling_of_the_test_set():
    shown = []
    for place, aft, softmax, samples in (
        (CIFAR10, 'aft-conv-mini*', 'deit*', 5000),
        (LONGER, 'aft-conv-mini*', 'deit*', 5000),
        (('cifar10_full_pixels', TOP1), CONV, 'deit-*_seed?', 5000),
        (LISTOPS_HITS, 'aft-simple-*', 'transformer-*', 2048),
        (PATHS, CONV, SOFTMAX.replace('transformer', 'deit'), 4000),
        (IMAGENETTE, 'aft-conv*', 'deit*', 300),
    ):
        lead = Claim(place, aft, softmax)
        rates = [Claim(place, group).mean / 100 for group in (aft, softmax)]
        error = 100 * math.sqrt(sum(rate * (1 - rate) / samples for rate in rates))
        shown.append(f'{lead.mean:.1f} ± {math.hypot(lead.half, 1.96 * error):.1f}')
    sentence = (
        'the leads are {} points on CIFAR-10 (28 epochs: {}; pixels: {}), {} on ListOps, {} on '
        'Pathfinder and {} on Imagenette'
    )
    assert sentence.format(*shown) in ' '.join(text_of(REPRODUCTION).split())
