"""Filter banks, resampling, masks and the Conformer equal those of torchaudio 2.11, stored here."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.registry import MODELS, init_default_scope

from aft_mm.datasets.sound_files import filter_banks, read_sound
from aft_mm.datasets.transforms.speech import SpecAugment

STORED = json.loads(Path(__file__).with_name('filter_banks.json').read_text())


@pytest.mark.parametrize('rate', STORED)
def test_filter_banks_equal_the_stored_ones(rate):
    t = np.arange(int(0.07 * int(rate))) / int(rate)
    sound = 0.3 * np.sin(2 * np.pi * (200 + 9000 * t) * t) + 0.05 * np.sin(2 * np.pi * 1234 * t)
    sound += 0.01 * np.cos(7e4 * t * t)
    found, stored = filter_banks(sound.astype('f4'), int(rate)), np.array(STORED[rate])
    # A float32 FFT rounds to the peak of the frame, in another way on each kind of CPU.
    amplitudes, right = np.exp(found / 2), np.exp(stored / 2)
    rounding = np.finfo('f4').eps * right.max(1, keepdims=True)
    assert (np.abs(amplitudes - right) <= 1e-4 * right + rounding).all()


@pytest.mark.parametrize('rate', [8000, 44_100, 47_999])
def test_a_resampled_tone_is_the_tone(tmp_path, rate):
    soundfile = pytest.importorskip('soundfile', reason='soundfile writes the sound of this test')
    tone = np.sin(2 * np.pi * 440 * np.arange(rate) / rate)
    soundfile.write(tmp_path / 'a.wav', 0.5 * tone, rate, subtype='FLOAT')
    found, _ = read_sound(str(tmp_path / 'a.wav'), 16_000)
    right = 0.5 * np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    assert found.dtype == np.float32 and found.shape == right.shape
    np.testing.assert_allclose(found[200:-200], right[200:-200], rtol=0, atol=5e-5)


def test_masks_are_where_the_seed_puts_them():
    features = np.ones((50, 40), np.float32)
    torch.manual_seed(0)
    masked = SpecAugment().transform(dict(features=features))['features']
    bins, frames = np.flatnonzero(~masked.any(0)), np.flatnonzero(~masked.any(1))
    assert bins.tolist() == [27, 28, 29] and frames.tolist() == [29, 30, 31, 40, 41, 42, 43]
    assert features.all() and masked.sum() == (40 - len(bins)) * (50 - len(frames))


def test_the_conformer_equals_the_stored_outputs():
    init_default_scope('aft_mm')
    encoder = dict(type='ConformerEncoder', num_features=8, embed_dims=8, num_layers=1, num_heads=2)
    model = MODELS.build(dict(encoder, kernel_size=5)).eval()
    with torch.no_grad():
        torch.nn.init.eye_(model.projection.weight), torch.nn.init.zeros_(model.projection.bias)
        for i, parameter in enumerate(model.conformer.parameters()):
            values = 0.5 * torch.sin(0.7 * torch.arange(parameter.numel()) + i)
            parameter.copy_(values.view_as(parameter))
        features = torch.sin(0.3 * torch.arange(96)).view(2, 6, 8)
        found = model(features, torch.arange(6) < torch.tensor([[6], [4]]))[:, 2].flatten()
    stored = [-0.31091, -0.25634, 0.00058, -0.06576, 0.43711, 0.49855, 0.444, 1.18794]
    stored += [-0.28687, -0.25705, -0.0633, -0.18597, 0.45819, 0.50694, 0.28609, 1.06317]
    np.testing.assert_allclose(found, stored, rtol=0, atol=1e-4)
