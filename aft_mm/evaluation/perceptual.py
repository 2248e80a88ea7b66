"""FID and LPIPS of drawn images, by torchmetrics' classes."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from mmengine.device import get_device
from mmengine.evaluator import BaseMetric
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.lpip import LearnedPerceptualImagePatchSimilarity

from aft_mm.checks import check_choice, check_int, check_sizes
from aft_mm.registry import METRICS

LPIPS_NETS = ('alex', 'vgg', 'squeeze')


class _DrawnImages(BaseMetric):
    """Keeps what was drawn and the truth as bytes, so that the set is measured once and whole.

    Args:
        image_shape: ``(H, W, C)`` of the images; grey ones are measured with three equal channels.
        batch_size: How many are measured at once.
        collect_device: See :class:`aft_mm.evaluation.Likelihood`.
        **kwargs: Those of :class:`mmengine.evaluator.BaseMetric`, such as ``prefix``.
    """

    default_prefix = ''  # without one mmengine warns in every run

    def __init__(
        self,
        image_shape: Sequence[int],
        batch_size: int = 32,
        collect_device: str = 'gpu',
        **kwargs,
    ) -> None:
        check_sizes('image_shape (H, W, C)', image_shape, (3,))
        check_int('batch_size', batch_size, 1)
        self.image_shape, self.batch_size = tuple(image_shape), batch_size
        super().__init__(collect_device=collect_device, **kwargs)

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Keep the tokens of an image [T, C] and those drawn for it, ``drawn`` [N, T, C].

        One result per sample, drawn or not: mmengine finds repeated samples by their number.
        """
        for tokens, sample in zip(data_batch['inputs'], data_samples, strict=True):
            drawn = sample.get('drawn')
            self.results.append(
                None if drawn is None else (self._pictures(tokens[None]), self._pictures(drawn))
            )

    def _pictures(self, tokens: Tensor) -> np.ndarray:
        pictures = tokens.cpu().numpy().astype(np.uint8).reshape(len(tokens), *self.image_shape)
        return pictures.transpose(0, 3, 1, 2)

    def _measured(self, results: list) -> list[tuple[np.ndarray, np.ndarray]]:
        """The pairs (truth [1, C, H, W], drawn [N, C, H, W]) that there are."""
        pairs = [pair for pair in results if pair is not None]
        if not pairs:
            raise ValueError(
                f'{type(self).__name__} needs images that were drawn, but there is '
                f'none in {len(results)} samples: test_cfg must be a '
                'GenerationTestLoop'
            )
        return pairs

    def _batches(self, pictures: Sequence[np.ndarray]) -> Iterator[Tensor]:
        """Images in batches [B, 3, H, W], uint8, on the device."""
        joined = torch.from_numpy(np.concatenate(pictures))
        for batch in joined.split(self.batch_size):
            yield batch.expand(-1, 3, -1, -1).to(get_device())


@METRICS.register_module()
class FID(_DrawnImages):
    """Fréchet inception distance between the drawn images and those they were drawn for.

    ``fid`` = ``|μ − μ'|² + tr(Σ + Σ' − 2 (Σ Σ')^½)`` of the features of both sets (arXiv
    1706.08500), by torchmetrics' FrechetInceptionDistance; 0 for the same set, without a unit. The
    number of images biases it: compare it only with numbers of as many.

    Args:
        feature: How many features of torch-fidelity's Inception, 64, 192, 768 or 2048, which the
            extra ``fid`` installs and which downloads its weights once; or a module that makes
            features [B, F] of images uint8 [B, 3, H, W].
        others: ``image_shape``, ``batch_size``, ``collect_device`` and those of
            :class:`mmengine.evaluator.BaseMetric`.

    Raises:
        ValueError: torch-fidelity is missing, its weights cannot be had, nothing was drawn, or
            there are fewer than two images.
    """

    def __init__(
        self, image_shape: Sequence[int], feature: int | nn.Module = 2048, **kwargs
    ) -> None:
        super().__init__(image_shape, **kwargs)
        try:
            self.distance = FrechetInceptionDistance(
                feature, input_img_size=(3, *self.image_shape[:2])
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
        """``{'fid': ...}``."""
        pairs = self._measured(results)
        if len(pairs) < 2:
            raise ValueError('FID needs at least two images that were drawn for, got 1')
        self.distance.to(get_device()).reset()
        for kind, real in ((0, True), (1, False)):
            for batch in self._batches([pair[kind] for pair in pairs]):
                self.distance.update(batch, real=real)
        return dict(fid=float(self.distance.compute()))


@METRICS.register_module()
class LPIPS(_DrawnImages):
    """Learned perceptual distance of drawn images from the truth (arXiv 1801.03924).

    By torchmetrics' LearnedPerceptualImagePatchSimilarity, whose network torchvision downloads
    once. ``lpips`` is the mean over the draws of an image and then over the images, without a unit;
    smaller is better.

    Args:
        net_type: ``'alex'``, ``'vgg'`` or ``'squeeze'``.
        others: As of :class:`FID`.

    Raises:
        ValueError: ``net_type`` is none of these, its weights cannot be had, or nothing was drawn.
    """

    def __init__(self, image_shape: Sequence[int], net_type: str = 'alex', **kwargs) -> None:
        check_choice('net_type', net_type, LPIPS_NETS)
        super().__init__(image_shape, **kwargs)
        try:
            self.distance = LearnedPerceptualImagePatchSimilarity(net_type, reduction='none')
        except OSError as error:
            raise ValueError(f'the weights of LPIPS cannot be downloaded: {error}') from error

    @torch.no_grad()
    def compute_metrics(self, results: list) -> dict:
        """``{'lpips': ...}``."""
        self.distance.to(get_device())
        means = []
        for truth, drawn in self._measured(results):
            distances = []
            (reference,) = self._batches([truth])
            for batch in self._batches([drawn]):
                pair = (_unit(batch), _unit(reference).expand_as(batch))
                distances.append(self.distance(*pair).reshape(-1))
            means.append(float(torch.cat(distances).mean()))
        return dict(lpips=float(np.mean(means)))


def _unit(images: Tensor) -> Tensor:
    """Bytes as floats from −1 to 1."""
    return images.float() / 127.5 - 1
