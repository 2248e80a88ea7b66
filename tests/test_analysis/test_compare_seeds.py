"""`aft_mm compare seeds`: groups of files, and rejected arguments."""

import json
from pathlib import Path

import pytest

from ..errors import stops
from ..helpers import command

main = command('compare seeds')


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = dict(a_seed0=2.61, a_seed1=2.58, a_seed2=2.63, b_seed0=2.51, text='2.5', true=True)
    values['nan'] = float('nan')
    for name, value in values.items():
        metrics = dict(bits_per_char=value, perplexity_per_char=6.1)
        Path(f'{name}.json').write_text(json.dumps(metrics))
    Path('list.json').write_text('[2.5]')
    Path('half.json').write_text('{"bits_per_char": 2.')
    Path('deep.json').write_text('[' * 10**5)
    Path('bytes.json').write_bytes(b'\x80\x00')
    return tmp_path


A = ['--group', 'a', 'a_seed0.json', 'a_seed1.json', 'a_seed2.json']
B = ['--group', 'b', 'b_seed0.json']
TABLE = """\
| group | n | bits/char | difference from a | p |
| --- | ---: | ---: | ---: | ---: |
| a | 3 | 2.607 ± 0.063 | – | – |
| b | 1 | 2.510 | -0.097 | – |
"""


def test_the_table(files, capsys):
    main(['--metric', 'bits_per_char', *A, *B])
    assert capsys.readouterr().out == TABLE


def test_the_table_from_the_shell(root, run, files):
    tool = root / 'tools/analysis_tools/compare_seeds.py'
    result = run(tool, '--metric', 'bits_per_char', '--label', 'test loss [bits]', *A, cwd=files)
    assert '| test loss [bits] |' in result.stdout, result.stderr


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (
            ['--metric', 'bits_per_dim', *A],
            r"'a_seed0.json' has no metric 'bits_per_dim'; it holds bits_per_char, perplexity_per_char$",
        ),
        ([*A, '--group', 'c', 'half.json'], "'half.json' is damaged or not JSON: "),
        ([*A, '--group', 'c', 'deep.json'], "'deep.json' is damaged or not JSON: maximum recur"),
        ([*A, '--group', 'c', 'bytes.json'], "'bytes.json' is not valid UTF-8 in byte 0"),
        ([*A, '--group', 'c', 'list.json'], "'list.json' must hold metrics .*, got a list"),
        ([*A, '--group', 'c', 'no.json'], "'no.json' cannot be read: No such file"),
        ([*A, '--group', 'c', 'text.json'], "bits_per_char of 'text.json' must be .* got '2.5'"),
        ([*A, '--group', 'c', 'nan.json'], 'must be a finite number, got nan'),
        ([*A, '--group', 'c', 'true.json'], 'must be a finite number, got True'),
        ([*A, '--group', 'c'], r'--group must be LABEL FILE \[FILE ...\], got c'),
        (
            [*A, '--group', 'b_seed0.json', 'b_seed0.json'],
            '--group must be LABEL FILE .* got b_seed0',
        ),
        ([*A, '--group', 'a', 'b_seed0.json'], "--group must have unique labels, got 'a' twice"),
        ([*A, *A[:1], 'c', './a_seed0.json'], "different files, got './a_seed0.json' twice"),
        ([*A, *B, '--expect', 'b'], "--expect must be LABEL=. or LABEL=-, got 'b'"),
        ([*A, *B, '--expect', 'b=0'], "--expect must be LABEL=. or LABEL=-, got 'b=0'"),
        ([*A, *B, '--expect', 'a=+'], 'expected must name groups after the first, b, got a'),
    ],
)
def test_bad_arguments_give_a_one_line_message(files, words, message):
    metric = [] if '--metric' in words else ['--metric', 'bits_per_char']
    stops(message, main, [*metric, *words])
