"""Mixers of other packages, by the entry points ``aft_mm.mixers``, and the tests that they get."""

import os
import re
import subprocess
import sys

import pytest
import torch

from aft_mm.layers import AFTSimple
from aft_mm.testing import MixerContract

from ..documents import ROOT, blocks

MIXER, TESTS, *_ = blocks('docs/tutorials/own_mixer.md', 'python')
CONFIG = """
_base_ = 'aft_mm::image_classification/aft-conv-quickstart_1xb64-50e_digits'
model = dict(backbone=dict(token_mixer=dict(_delete_=True, type='aft_mm.Decay', rate=-2.0)))
"""


# Lists the mixers, counts a model of a config that imports nothing, and runs the tests of the page.
PROGRAM = """
import pytest
from aft_mm.cli.main import main
main(['list', '--mixers', 'decay'])
print('----')
main(['complexity', 'mine.py'])
raise SystemExit(pytest.main(['-q', '-p', 'no:cacheprovider', 'test_decay.py']))
"""


def test_mixers_of_other_packages_are_listed_built_and_tested(tmp_path):
    """One package adds a mixer, the other is broken."""
    (tmp_path / 'decay.py').write_text(MIXER.replace('mmengine.registry', 'aft_mm.registry'))
    (tmp_path / 'test_decay.py').write_text(TESTS)
    (tmp_path / 'mine.py').write_text(CONFIG)
    for name, module in (('good', 'decay'), ('bad', 'nowhere')):
        metadata = tmp_path / f'{name}-1.0.dist-info'
        metadata.mkdir()
        (metadata / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n')
        (metadata / 'entry_points.txt').write_text(f'[aft_mm.mixers]\nmine = {module}\n')
    environment = {**os.environ, 'PYTHONPATH': f'{tmp_path}{os.pathsep}{ROOT}'}
    words = [sys.executable, '-c', PROGRAM]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    listed, _, rest = done.stdout.partition('----')
    head, ours, theirs = listed.splitlines()
    assert re.fullmatch('mixer +package +description', head)
    assert re.fullmatch('aft_mm.AFTDecay +aft_mm +AFT-simple .*', ours)
    assert re.fullmatch('aft_mm.Decay +decay +AFT with w.t, t.. = .*', theirs)
    reason = "ModuleNotFoundError: No module named 'nowhere'"
    assert f'mixers of bad (nowhere) cannot be imported: {reason}' in done.stderr
    assert re.search(r'\bmine .*\d', rest) and re.search(r'\b1[0-9] passed', rest)


class Leaks(AFTSimple):
    """Sees later tokens, and padding."""

    def _mix(self, query, key, value, grid, key_mask):
        return super()._mix(query, key, value + value.mean(1, keepdim=True), grid, key_mask)


class Stays(AFTSimple):
    """Its steps do not advance."""

    def _mix_step(self, query, key, value, state):
        mixed, new = super()._mix_step(query, key, value, state)
        return mixed, new._replace(position=new.position - 1)


class Idles(AFTSimple):
    """Has a parameter that does nothing."""

    def __init__(self, embed_dims, **kwargs):
        super().__init__(embed_dims, **kwargs)
        self.idle = torch.nn.Parameter(torch.zeros(1))


class Rounds(AFTSimple):
    """Is not float32 where it should be."""

    def _mix(self, query, key, value, grid, key_mask):
        return super()._mix(query, key, value.bfloat16().to(value.dtype), grid, key_mask)


@pytest.mark.parametrize(
    'mixer, test',
    [
        (Leaks, 'test_causal_outputs_do_not_depend_on_later_tokens'),
        (Leaks, 'test_padding_has_no_influence_and_no_gradient'),
        (Stays, 'test_steps_equal_the_parallel_forward'),
        (Idles, 'test_output_has_the_input_shape_and_every_parameter_gets_a_gradient'),
        (Rounds, 'test_steps_of_a_float64_model_are_float64'),
        (Idles, 'test_configs_find_it'),
    ],
)
def test_the_contract_finds_faults(mixer, test):
    tests = type(f'Test{mixer.__name__}', (MixerContract,), dict(mixer=mixer))
    with pytest.raises(AssertionError):
        getattr(tests(), test)()
