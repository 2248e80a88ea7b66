"""Tell a backbone where the images of a padded batch end."""

from typing import Any

import torch
from mmengine.model import BaseDataPreprocessor
from torch import Tensor

from aft_mm.registry import MODELS


@MODELS.register_module()
class MaskedDataPreprocessor(BaseDataPreprocessor):
    """Append to the batch of another preprocessor a channel that is 1 inside of each image.

    ``[B, C, H, W] -> [B, C + 1, H, W]``: detectors and segmentors hand their backbone the batch and
    nothing else, so the mask goes with it, through crops too. For AFTViT(with_mask_channel=True).

    The size of an image is its sample's `img_shape` after the inner preprocessor, which mmdet keeps
    up to date where it resizes a batch, and mmseg sets in training; padding lies at the bottom and
    on the right, as both put it. Without samples, or where a sample has no `img_shape`, it is the
    size in which the image came. A `Pad` in the data pipeline makes its padding part of the image.

    Args:
        preprocessor: config of the inner one, such as a dict of type 'mmdet.DetDataPreprocessor'.
    """

    def __init__(self, preprocessor: dict[str, Any]) -> None:
        super().__init__()
        self.preprocessor = MODELS.build(preprocessor)

    def forward(self, data: dict, training: bool = False) -> dict:
        """The inner preprocessor's batch with the mask as its last channel.

        Raises ValueError if that batch is not [B, C, H, W].
        """
        # A model tells its preprocessors the device, who else moves this one does not.
        self.preprocessor.to(self.device)
        came = [image.shape[-2:] for image in data['inputs']]
        batch = self.preprocessor(data, training)
        inputs = batch['inputs']
        if not isinstance(inputs, Tensor) or inputs.dim() != 4:
            shape = list(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
            raise ValueError(f'preprocessor must give a batch [B, C, H, W], got {shape}')
        samples = batch.get('data_samples') or [{}] * len(came)
        sizes = [sample.get('img_shape', size) for sample, size in zip(samples, came, strict=True)]
        return {**batch, 'inputs': torch.cat([inputs, _inside(sizes, inputs)], dim=1)}


def _inside(sizes: list, inputs: Tensor) -> Tensor:
    """1 in the first rows and columns of each image, 0 elsewhere, [B, 1, H, W]."""
    ends = torch.tensor([size[:2] for size in sizes], device=inputs.device)
    height, width = (torch.arange(n, device=inputs.device) for n in inputs.shape[2:])
    rows, columns = height < ends[:, :1], width < ends[:, 1:]
    return (rows[:, None, :, None] & columns[:, None, None, :]).to(inputs.dtype)
