from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from mmengine.device import get_device
from torch import Tensor, nn

from aft_mm.checks import check_choice, check_int, check_sizes, refuse
from aft_mm.errors import import_from_extra
from aft_mm.registry import METRICS

from .base import GenerationMetric

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
