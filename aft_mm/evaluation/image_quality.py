from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aft_mm.checks import check_sizes
from aft_mm.errors import import_from_extra
from aft_mm.images import enlarge_bicubic
from aft_mm.registry import METRICS

from .base import GenerationMetric

SMALLEST = 6  # pixels; half of SSIM's window is mirrored at the edges


@METRICS.register_module()
class ImageQuality(GenerationMetric):
    """Distance of sampled images to the truth and to their low-resolution input.

    For each ``kind``, ``sample``, ``mean`` (of the N samples of an input) and ``bicubic`` (the
    enlarged
    input):

    - ``{kind}_psnr_db``: ``10 log₁₀ (255² / MSE)`` [dB];
    - ``{kind}_ssim``: structural similarity by torchmetrics, Gaussian window of 11 × 11 pixels with
      σ = 1.5, mirrored edges;
    - ``{kind}_consistency_mse``: mean squared difference between the input and the image shrunk by
      area, for values from 0 to 1.

    Averaged over the samples of an input, then over the inputs with ``generated``.

    Args:
        image_shape: ``(H, W, C)`` of the images.
        source_shape: ``(h, w, C)`` of the inputs.
        **kwargs: See :class:`Metric`.
    """

    def __init__(
        self, image_shape: Sequence[int], source_shape: Sequence[int], **kwargs: Any
    ) -> None:
        check_sizes('image_shape (H, W, C)', image_shape, (3,))
        check_sizes('source_shape (h, w, C)', source_shape, (3,))
        self.image_shape, self.source_shape = tuple(image_shape), tuple(source_shape)
        if min(self.image_shape[:2]) < SMALLEST:
            raise ValueError(
                f'image_shape must be (H, W, C) with H and W at least {SMALLEST}, for '
                f'the window of the similarity, got {self.image_shape}'
            )
        source = self.source_shape
        fits = source[2] == self.image_shape[2]
        if not fits or any(np.mod(self.image_shape[:2], source[:2])):
            raise ValueError(
                f'source_shape must be (h, w, C) that divides H and W of image_shape '
                f'{self.image_shape} and has its C, got {source}'
            )
        import_from_extra('torchmetrics', 'quality', 'ImageQuality needs')
        super().__init__(**kwargs)

    def compute_metrics(self, results: list) -> dict:
        measured = self._measured(results)
        if not measured:
            return {}
        return {name: float(np.mean([result[name] for result in measured])) for name in measured[0]}

    def _measure(self, tokens: Tensor, sample: dict) -> dict[str, float]:
        images, source = _pictures(sample['generated'], self.image_shape), sample['source']
        small = _pictures(source[None], self.source_shape)
        pixels = source.cpu().numpy().astype(np.uint8).reshape(self.source_shape)
        height, width, _ = self.image_shape
        enlarged = torch.from_numpy(enlarge_bicubic(pixels, (height, width)))
        kinds = dict(
            sample=images,
            mean=images.mean(0, keepdim=True),
            bicubic=_pictures(enlarged[None], self.image_shape),
        )
        truth = _pictures(tokens[None], self.image_shape)
        return {
            f'{kind}_{name}': value
            for kind, pictures in kinds.items()
            for name, value in image_quality(pictures, truth, small).items()
        }


def image_quality(images: Tensor, truth: Tensor, source: Tensor) -> dict[str, float]:
    """Return psnr_db, ssim and consistency_mse of :class:`ImageQuality`, averaged over N images.

    Args:
        images: [N, C, H, W], float, 0 to 255.
        truth: [1, C, H, W].
        source: [1, C, h, w]; h divides H, w divides W.
    """
    metrics = import_from_extra('torchmetrics.functional.image', 'quality', 'image_quality needs')
    truth = truth.expand_as(images)
    shrunk = F.interpolate(images, size=source.shape[2:], mode='area')
    psnr = metrics.peak_signal_noise_ratio(images, truth, data_range=255.0, dim=(1, 2, 3))
    ssim = metrics.structural_similarity_index_measure(images, truth, data_range=255.0)
    return dict(
        psnr_db=psnr.item(),
        ssim=ssim.item(),
        consistency_mse=F.mse_loss(shrunk / 255, source.expand_as(shrunk) / 255).item(),
    )


def _pictures(tokens: Tensor, shape: Sequence[int]) -> Tensor:
    return tokens.cpu().double().reshape(len(tokens), *shape).permute(0, 3, 1, 2)
