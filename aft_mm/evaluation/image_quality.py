"""Metrics of sampled images."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from mmengine.device import get_device
from torch import Tensor, nn

from aft_mm.checks import check_choice, check_int, check_sizes, refuse
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


LPIPS_NETS = ('alex', 'vgg', 'squeeze')


class _ImageSetMetric(GenerationMetric):
    """Base class that collects the generated and the true images as bytes."""

    def __init__(self, image_shape: Sequence[int], batch_size: int = 32, **kwargs: Any) -> None:
        check_sizes('image_shape (H, W, C)', image_shape, (3,))
        check_int('batch_size', batch_size, 1)
        self.image_shape, self.batch_size = tuple(image_shape), batch_size
        super().__init__(**kwargs)

    def _measure(self, tokens: Tensor, sample: dict) -> tuple[np.ndarray, np.ndarray]:
        return self._pictures(tokens[None]), self._pictures(sample['generated'])

    def _pictures(self, tokens: Tensor) -> np.ndarray:
        pictures = tokens.cpu().numpy().astype(np.uint8).reshape(len(tokens), *self.image_shape)
        return pictures.transpose(0, 3, 1, 2)

    def _batches(self, pictures: Sequence[np.ndarray]) -> Iterator[Tensor]:
        joined = torch.from_numpy(np.concatenate(pictures))
        for batch in joined.split(self.batch_size):
            yield batch.expand(-1, 3, -1, -1).to(get_device())


@METRICS.register_module()
class FID(_ImageSetMetric):
    """Fréchet inception distance between sampled and true images (arXiv 1706.08500).

    ``fid`` = ``|μ − μ'|² + tr(Σ + Σ' − 2 (Σ Σ')^½)`` over the features of both sets.

    Args:
        feature: 64, 192, 768 or 2048 features of torch-fidelity's Inception (extra ``fid``),
            downloaded
            once; or a module from images uint8 [B, 3, H, W] to features [B, F].
        others: ``image_shape``, ``batch_size`` and arguments of :class:`Metric`.

    Raises:
        ValueError: If torch-fidelity or its weights are missing, or there is only one image.
    """

    def __init__(
        self, image_shape: Sequence[int], feature: int | nn.Module = 2048, **kwargs: Any
    ) -> None:
        super().__init__(image_shape, **kwargs)
        try:
            height, width, _ = self.image_shape
            # Only the first rank computes; torchmetrics would wait for the others.
            fid = import_from_extra('torchmetrics.image.fid', 'quality', 'FID needs')
            self.distance = fid.FrechetInceptionDistance(
                feature, input_img_size=(3, height, width), sync_on_compute=False
            )
        except ModuleNotFoundError as error:
            raise ValueError(
                'FID needs torch-fidelity, which pip install aft_mm[fid] installs, or '
                'a module of its own as feature'
            ) from error
        except OSError as error:
            raise ValueError(f'the weights of FID cannot be downloaded: {error}') from error

    @torch.no_grad()
    def compute_metrics(self, results: list) -> dict:
        pairs = self._measured(results)
        if not pairs:
            return {}
        if len(pairs) < 2:
            raise ValueError('FID needs at least two images with samples, got 1')
        self.distance.to(get_device()).reset()
        for kind, real in ((0, True), (1, False)):
            for batch in self._batches([pair[kind] for pair in pairs]):
                self.distance.update(batch, real=real)
        return dict(fid=float(self.distance.compute()))


@METRICS.register_module()
class LPIPS(_ImageSetMetric):
    """Learned perceptual distance between sampled and true images (arXiv 1801.03924).

    ``lpips`` is averaged over the samples of an image, then over the images.

    Args:
        net_type: ``'alex'``, ``'vgg'`` or ``'squeeze'``.
        others: See :class:`FID`.

    Raises:
        ValueError: If ``net_type`` is unknown, or its weights are missing.
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        net_type: Literal['alex', 'vgg', 'squeeze'] = 'alex',
        **kwargs: Any,
    ) -> None:
        check_choice('net_type', net_type, LPIPS_NETS)
        super().__init__(image_shape, **kwargs)
        lpip = import_from_extra('torchmetrics.image.lpip', 'quality', 'LPIPS needs')
        try:
            self.distance = lpip.LearnedPerceptualImagePatchSimilarity(net_type, reduction='none')
        except OSError as error:
            raise ValueError(f'the weights of LPIPS cannot be downloaded: {error}') from error
        empty = torch.zeros(1, 3, *image_shape[:2])
        try:
            self.distance.net(empty, empty)
        except RuntimeError:  # a map smaller than a filter
            refuse('image_shape', f'large enough for {net_type}', list(image_shape))

    @torch.no_grad()
    def compute_metrics(self, results: list) -> dict:
        self.distance.to(get_device())
        means = []
        for truth, generated in self._measured(results):
            distances = []
            (reference,) = self._batches([truth])
            for batch in self._batches([generated]):
                pair = (_unit(batch), _unit(reference).expand_as(batch))
                distances.append(self.distance(*pair).reshape(-1))
            means.append(float(torch.cat(distances).mean()))
        return dict(lpips=float(np.mean(means))) if means else {}


def _unit(images: Tensor) -> Tensor:
    return images.float() / 127.5 - 1
