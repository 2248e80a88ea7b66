"""ImageQuality against the formulas."""

import math

import numpy as np
import pytest
import torch
from mmengine.evaluator import Evaluator
from mmengine.registry import METRICS
from PIL import Image
from scipy.ndimage import gaussian_filter

from aft_mm.evaluation import ImageQuality
from aft_mm.structures import SequenceSample

SHAPE, SMALL = (24, 20, 3), (6, 10, 3)


def area(images, shape):
    (height, width, channels), (rows, columns, _) = images.shape[-3:], shape
    parts = images.reshape(-1, rows, height // rows, columns, width // columns, channels)
    return parts.mean((2, 4), dtype=np.float64)


def example(seed, num=3):
    """Return a smooth image, its small source, and `num` noisy copies."""
    rng = np.random.default_rng(seed)
    noise = gaussian_filter(rng.normal(size=SHAPE), (3, 3, 0))
    truth = np.clip(128 + 400 * noise, 0, 255).astype(np.uint8)
    generated = truth + rng.normal(0, 9, (num, *SHAPE))
    return (
        truth,
        area(truth, SMALL)[0].round().astype(np.uint8),
        generated.clip(0, 255).astype(np.uint8),
    )


def tokens(image):
    return torch.from_numpy(image).flatten(-3, -2)


def evaluate(examples, batch_size=2, **options):
    evaluator = Evaluator(ImageQuality(SHAPE, SMALL, **options))
    for i in range(0, len(examples), batch_size):
        batch, samples = dict(inputs=[]), []
        for truth, source, generated in examples[i : i + batch_size]:
            batch['inputs'].append(tokens(truth))
            samples.append(SequenceSample(source=tokens(source)))
            if generated is not None:
                samples[-1].generated = tokens(generated).long()
        evaluator.process(data_samples=samples, data_batch=batch)
    return evaluator.evaluate(len(examples))


def ssim(image, truth):
    """Equation 13 of Wang et al. 2004."""

    def mean(x):
        return gaussian_filter(x, (1.5, 1.5, 0), mode='mirror', truncate=3.5)

    x, y = image.astype(np.float64), truth.astype(np.float64)
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    mx, my = mean(x), mean(y)
    vx, vy, cov = mean(x * x) - mx**2, mean(y * y) - my**2, mean(x * y) - mx * my
    return ((2 * mx * my + c1) * (2 * cov + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2))).mean()


def psnr(image, truth):
    return 10 * math.log10(255**2 / np.mean((image.astype(np.float64) - truth) ** 2))


def test_metrics_equal_the_formulas():
    examples = [example(seed) for seed in range(3)]
    metrics = evaluate(examples)
    expected = {}
    for truth, source, generated in examples:
        bicubic = np.asarray(Image.fromarray(source).resize((20, 24), Image.Resampling.BICUBIC))
        for kind, images in dict(
            sample=generated, mean=generated.mean(0)[None], bicubic=bicubic[None]
        ).items():
            gaps = area(images, SMALL) / 255 - source / 255
            for name, value in dict(
                psnr_db=np.mean([psnr(image, truth) for image in images]),
                ssim=np.mean([ssim(image, truth) for image in images]),
                consistency_mse=np.mean(gaps**2),
            ).items():
                expected.setdefault(f'{kind}_{name}', []).append(value)

    assert metrics == pytest.approx({name: np.mean(v) for name, v in expected.items()}, rel=1e-5)
    assert metrics['mean_psnr_db'] > metrics['sample_psnr_db'] + 2  # noise averages out


def test_the_true_image_has_perfect_quality():
    truth, source, _ = example(0)
    metrics = evaluate([(truth, source, truth[None])])
    assert metrics['sample_psnr_db'] == math.inf
    assert metrics['sample_ssim'] == pytest.approx(1)
    assert 0 < metrics['sample_consistency_mse'] <= (1 / 510) ** 2  # the source is rounded


def test_batches_do_not_matter_and_inputs_without_samples_are_left_out():
    examples = [example(seed) for seed in range(5)]
    metrics = evaluate(examples[:3], batch_size=1)
    rest = [(truth, source, None) for truth, source, _ in examples[3:]]
    assert evaluate(examples[:3] + rest, batch_size=4) == metrics
    assert evaluate(rest) == {}


def test_grey_images():
    truth, source, generated = (x[..., :1] for x in example(0))
    metric = METRICS.build(
        dict(
            type='aft_mm.ImageQuality',
            image_shape=(24, 20, 1),
            source_shape=(6, 10, 1),
            prefix='grey',
        )
    )
    evaluator = Evaluator(metric)
    sample = SequenceSample(source=tokens(source)[:, 0], generated=tokens(generated)[:, :, 0])
    evaluator.process(data_samples=[sample], data_batch=dict(inputs=[tokens(truth)[:, 0]]))
    expected = np.mean([psnr(image, truth) for image in generated])
    assert evaluator.evaluate(1)['grey/sample_psnr_db'] == pytest.approx(expected)


@pytest.mark.parametrize(
    'image, source, message',
    [
        ((5, 12, 3), (5, 6, 3), 'H and W at least 6'),
        ((32, 32), (8, 8), r'image_shape \(H, W, C\) must be 3 ints'),
        ((32, 32, 3), (8, 8), r'source_shape \(h, w, C\) must be 3 ints'),
        ((32, 32, 3), (8, 0, 3), '3 ints, 1 or larger'),
        ((32, 32, 3), (8, 5, 3), r'divides H and W of image_shape \(32, 32, 3\)'),
        ((32, 32, 3), (8, 8, 1), 'has its C'),
    ],
)
def test_shapes_that_do_not_match_are_refused(image, source, message):
    with pytest.raises(ValueError, match=message):
        ImageQuality(image, source)
