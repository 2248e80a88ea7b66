"""FID and LPIPS with networks that need no download, compared with formula and torchmetrics."""

import sys
import urllib.error

import numpy as np
import pytest
import torch
import torchvision
from mmengine.evaluator import Evaluator
from scipy.linalg import sqrtm
from torch import nn
from torchmetrics.functional.image import learned_perceptual_image_patch_similarity

from aft_mm.evaluation import FID, LPIPS
from aft_mm.structures import SequenceSample

SHAPE = (40, 36, 3)


class Means(nn.Module):
    """Features [B, 6] of images: the means of their halves."""

    num_features = 6

    def forward(self, images):
        assert images.dtype == torch.uint8 and images.shape[1] == 3
        upper, lower = images.float().div(255).chunk(2, dim=2)
        return torch.cat([upper.mean((2, 3)), lower.mean((2, 3))], 1)


def examples(count, draws, seed=0, shape=SHAPE):
    """Return true images [H, W, C] and N samples of each [N, H, W, C]."""
    rng = np.random.default_rng(seed)
    colours = rng.integers(20, 200, (count, 1, 1, shape[-1]))
    truths = (colours + rng.integers(0, 50, (count, *shape))).astype(np.uint8)
    generated = (truths[:, None] + rng.integers(0, 30, (count, draws, 1, 1, 1))).clip(0, 255)
    return truths, generated.astype(np.uint8)


def evaluate(metric, truths, generated, left_out=0):
    evaluator = Evaluator(metric)
    for index, truth in enumerate(truths):
        sample = SequenceSample()
        if index < len(truths) - left_out:
            sample.generated = torch.from_numpy(generated[index]).flatten(1, 2).long()
        inputs = [torch.from_numpy(truth).flatten(0, 1)]
        evaluator.process(data_samples=[sample], data_batch=dict(inputs=inputs))
    return evaluator.evaluate(len(truths))


@pytest.mark.parametrize('left_out', [0, 3])
def test_fid_is_the_formula_over_the_features(left_out):
    truths, generated = examples(20, 2)
    found = evaluate(FID(SHAPE, feature=Means(), batch_size=7), truths, generated, left_out)
    count = len(truths) - left_out
    features = [
        Means()(torch.from_numpy(images.reshape(-1, *SHAPE)).permute(0, 3, 1, 2)).double()
        for images in (truths[:count], generated[:count])
    ]
    (mean, cov), (other_mean, other_cov) = (
        (f.mean(0).numpy(), np.cov(f.numpy(), rowvar=False)) for f in features
    )
    expected = ((mean - other_mean) ** 2).sum() + np.trace(
        cov + other_cov - 2 * sqrtm(cov @ other_cov).real
    )
    assert found == {'fid': pytest.approx(expected, rel=1e-4)} and expected > 1e-3


def test_fid_of_the_same_set_is_zero_and_of_grey_images_has_three_channels():
    shape = (10, 8, 1)
    truths, _ = examples(12, 1, shape=shape)
    metric = FID(shape, feature=Means())
    assert evaluate(metric, truths, truths[::-1, None].copy())['fid'] == pytest.approx(0, abs=1e-6)
    # A second evaluation does not depend on the first.
    truths, generated = examples(12, 1, seed=1, shape=shape)
    again = evaluate(metric, truths, generated)
    assert again == evaluate(FID(shape, feature=Means()), truths, generated) and again['fid'] > 1e-4


def test_missing_requirements_of_fid_give_a_one_line_message(monkeypatch):
    monkeypatch.setattr('torchmetrics.image.fid._TORCH_FIDELITY_AVAILABLE', False)
    with pytest.raises(ValueError, match=r'FID needs torch-fidelity, .*aft_mm\[fid'):
        FID(SHAPE)
    truths, generated = examples(3, 1)
    with pytest.raises(ValueError, match='at least two images with samples, got 1'):
        evaluate(FID(SHAPE, feature=Means()), truths, generated, left_out=2)
    assert evaluate(FID(SHAPE, feature=Means()), truths, generated, left_out=3) == {}


@pytest.fixture
def squeeze(monkeypatch):
    torch.manual_seed(0)
    weights = torchvision.models.squeezenet1_1(weights=None).state_dict()
    monkeypatch.setattr(
        torchvision.models.squeezenet,
        '_squeezenet',
        lambda version, weights_enum, progress, **kwargs: filled(version, weights, **kwargs),
    )


def filled(version, weights, **kwargs):
    model = torchvision.models.SqueezeNet(version, **kwargs)
    model.load_state_dict(weights)
    return model


def test_lpips_is_averaged_over_samples_and_then_over_images(squeeze):
    truths, generated = examples(3, 2)
    found = evaluate(LPIPS(SHAPE, 'squeeze', batch_size=1), truths, generated)['lpips']

    def distance(a, b):
        pair = (torch.from_numpy(x).permute(2, 0, 1)[None] / 255 for x in (a, b))
        return learned_perceptual_image_patch_similarity(
            *pair, net_type='squeeze', normalize=True
        ).item()

    expected = np.mean(
        [
            [distance(draw, truth) for draw in draws]
            for truth, draws in zip(truths, generated, strict=True)
        ]
    )
    assert found == pytest.approx(expected, rel=1e-4) and found > 1e-5
    with pytest.raises(
        ValueError, match=r'image_shape must be large enough for squeeze, got \[8, 8'
    ):
        LPIPS((8, 8, 3), 'squeeze')
    same = evaluate(LPIPS(SHAPE, 'squeeze'), truths, truths[:, None])
    assert same == {'lpips': pytest.approx(0, abs=1e-7)}


def test_missing_requirements_of_lpips_give_a_one_line_message(monkeypatch):
    def no_network(*args, **kwargs):
        raise urllib.error.URLError('no network')

    monkeypatch.setattr('torch.hub.load_state_dict_from_url', no_network)
    for name, module in list(sys.modules.items()):
        if name.startswith('torchvision.models') and hasattr(module, 'load_state_dict_from_url'):
            monkeypatch.setattr(module, 'load_state_dict_from_url', no_network)
    with pytest.raises(ValueError, match='weights of LPIPS cannot be downloaded: .*no network'):
        LPIPS(SHAPE, 'squeeze')
    with pytest.raises(ValueError, match='net_type must be'):
        LPIPS(SHAPE, 'resnet')
