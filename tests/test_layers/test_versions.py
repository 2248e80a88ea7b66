"""Checkpoints of a mixer that has begun to compute another function of the same parameters."""

import logging

import pytest
import torch
from mmengine.runner.checkpoint import load_state_dict
from torch import nn

from aft_mm.checkpoint import load_from_local, load_weights
from aft_mm.errors import UserError
from aft_mm.layers import TokenMixer
from aft_mm.layers.mixers import base
from aft_mm.registry import MODELS

CHANGED = [
    ('AFTLocalLearned', dict(window=2)),
    ('AFTLocalHard', dict(window=(2, 4))),
]


def build(name: str, **options) -> TokenMixer:
    shared = dict(type=f'aft_mm.{name}', embed_dims=8, grid=(3, 5), causal=True)
    return MODELS.build({**shared, **options})


def saved_by(version, mixer):
    """The state of the mixer in a model, as the version of it saved it."""
    state = nn.Sequential(mixer).state_dict()
    state._metadata['0']['version'] = version
    return state


@pytest.mark.parametrize('name, options', CHANGED, ids=str)
def test_a_checkpoint_of_another_function_is_refused(name, options):
    mixer = build(name, **options)
    model = nn.Sequential(mixer)
    with pytest.raises(ValueError, match=f'^0 of the checkpoint was saved by .* whose {name}'):
        load_state_dict(model, saved_by(1, mixer))
    load_state_dict(model, saved_by(2, mixer), strict=True)


@pytest.mark.parametrize('name, options', CHANGED, ids=str)
def test_a_checkpoint_that_does_not_tell_its_version_is_loaded_with_a_warning(
    name, options, monkeypatch
):
    logged = []
    monkeypatch.setattr(base, 'print_log', lambda *message: logged.append(message))
    mixer = build(name, **options)
    load_state_dict(nn.Sequential(mixer), dict(nn.Sequential(mixer).state_dict()), strict=True)
    ((sentence, _, level),) = logged
    assert sentence.startswith('0 of the checkpoint does not tell its version: if aft_mm 0.1 ')
    assert name in sentence and level == logging.WARNING


@pytest.mark.parametrize(
    'name, options',
    [('AFTLocalHard', dict(window=5, grid=(15,))), ('AFTLocalHard', dict(window=2, causal=False))],
    ids=str,
)
def test_a_window_that_has_not_changed_takes_its_old_checkpoint(name, options):
    mixer = build(name, **options)
    load_state_dict(nn.Sequential(mixer), saved_by(1, mixer), strict=True)


@pytest.mark.parametrize('wrapped', [False, True], ids=['plain', 'in a wrapper'])
def test_a_file_is_refused_by_what_the_tools_load_with(wrapped, tmp_path, monkeypatch):
    mixer = build('AFTLocalLearned', window=2)
    model = nn.Sequential(mixer)

    def load(version):
        state = saved_by(version, mixer)
        if wrapped:
            for part in (state, state._metadata):
                for name in list(part):
                    part[f'module.{name}'.rstrip('.')] = part.pop(name)
        torch.save(dict(state_dict=state), tmp_path / 'epoch_1.pth')
        load_weights(model, load_from_local(tmp_path / 'epoch_1.pth', 'cpu'), 'a model')

    with pytest.raises(UserError, match='^0 of the checkpoint was saved by aft_mm 0.1, whose AFT'):
        load(1)
    monkeypatch.setattr(base, 'print_log', lambda *message: pytest.fail(message[0]))
    load(2)


def test_a_raster_that_the_steps_would_not_know_is_refused():
    with pytest.raises(ValueError, match=r'grid must be given to AFTLocalHard.* got \(3, 5\)'):
        build('AFTLocalHard', window=2, grid=None)(torch.randn(1, 15, 8), grid=(3, 5))
