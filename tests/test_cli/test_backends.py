"""Log of the backends in use, and errors about wrong backend settings."""

import logging
from types import SimpleNamespace

import pytest
import torch
from mmengine.logging import MMLogger

from aft_mm import ops
from aft_mm.cli.commands.train import log_backends
from aft_mm.ops import dispatch

from ..errors import stops


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


@pytest.mark.parametrize(
    'words',
    [
        'train no.py',
        'test no.py a.pth',
        'sample no.py a.pth --out a.png',
        'super_resolve no.py a.pth a.png b.png',
        'transcribe no.py a.pth a.wav',
        'translate no.py a.pth',
    ],
)
def test_every_tool_that_runs_a_model_configures_the_allocator(words, tool, monkeypatch):
    name, *words = words.split()
    monkeypatch.setenv('AFT_MM_MALLOC', 'always')
    message = "^Error: AFT_MM_MALLOC must be one of .*, got 'always'$"
    stops(message, tool(name).main, words)
