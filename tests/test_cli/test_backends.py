"""Log of the backends in use, and errors about wrong backend settings."""

import logging
from types import SimpleNamespace

import pytest
import torch
from mmengine.logging import MMLogger

from aft_mm import ops
from aft_mm.cli.commands.train import log_backends
from aft_mm.ops import dispatch


@pytest.fixture
def logger(monkeypatch, tmp_path):
    log = logging.getLogger('aft_mm.ops')
    monkeypatch.setattr(log, 'handlers', [])
    monkeypatch.setattr(log, 'level', log.level)
    monkeypatch.setattr(dispatch, '_logged', set())
    monkeypatch.delenv('AFT_MM_BACKEND', raising=False)
    return MMLogger(f'run-{tmp_path.name}', log_file=str(tmp_path / 'run.log'))


def test_the_log_names_the_backend_of_an_op_once(logger, tmp_path, monkeypatch):
    for _ in range(2):  # a second run does not log again
        log_backends(SimpleNamespace(logger=logger))
    x = torch.randn(1, 3, 2)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        ops.aft_simple(*[x.to(dtype)] * 3)
    monkeypatch.setenv('AFT_MM_BACKEND', 'reference')
    ops.aft_simple(x, x, x)
    written = (tmp_path / 'run.log').read_text().splitlines()
    assert [line.rpartition(' - ')[2] for line in written] == [
        'eager backend used for aft_simple in float32',
        'eager backend used for aft_simple in bfloat16',
        'reference backend used for aft_simple in float32',
    ]


RUNS = [['train', 'no.py'], ['test', 'no.py', 'a.pth']]
DRAWS = [
    ['sample', 'no.py', 'a.pth', '--out', 'a.png'],
    ['super_resolve', 'no.py', 'a.pth', 'a.png', 'b.png'],
    ['transcribe', 'no.py', 'a.pth', 'a.wav'],
    ['translate', 'no.py', 'a.pth'],
]


@pytest.mark.parametrize(
    ('words', 'variable'),
    [
        # Every tool that runs a model configures the allocator.
        *((words, 'AFT_MM_MALLOC') for words in [*RUNS, *DRAWS]),
    ],
)
def test_a_wrong_setting_has_a_one_line_message(words, variable, tool, monkeypatch):
    monkeypatch.setenv(variable, 'always')
    with pytest.raises(SystemExit, match=f"^Error: {variable} must be one of .*, got 'always'$"):
        tool(words[0]).main(words[1:])
