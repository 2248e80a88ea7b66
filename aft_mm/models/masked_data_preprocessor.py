from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aft_mm.openmmlab import BaseDataPreprocessor
from aft_mm.registry import MODELS


@MODELS.register_module()
class MaskedDataPreprocessor(BaseDataPreprocessor):
    """Append a mask channel to the batch of another preprocessor, 1 inside each image.

    ``[B, C, H, W] -> [B, C + 1, H, W]``, for AFTViT(with_mask_channel=True): detectors and
    segmentors only pass the batch to their backbone.

    The size of an image is the `img_shape` of its sample, else that of the input; padding of a
    `Pad` in the pipeline counts as image.

    Args:
        preprocessor: Config of the inner one, such as ``dict(type='mmdet.DetDataPreprocessor')``.
    """

    def __init__(self, preprocessor: dict[str, Any]) -> None:
        super().__init__()
        self.preprocessor = MODELS.build(preprocessor)

    def forward(self, data: dict[str, Any], training: bool = False) -> dict[str, Any]:
        """Return the inner preprocessor's batch with the mask as last channel."""
        # BaseModel.to() only updates the outer one.
        self.preprocessor.to(self.device)
        given = [image.shape[-2:] for image in data['inputs']]
        batch = self.preprocessor(data, training)
        inputs = batch['inputs']
        if not isinstance(inputs, Tensor) or inputs.dim() != 4:
            shape = list(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
            raise ValueError(f'preprocessor must give a batch [B, C, H, W], got {shape}')
        samples = batch.get('data_samples') or [{}] * len(given)
        sizes = [sample.get('img_shape', size) for sample, size in zip(samples, given, strict=True)]
        return {**batch, 'inputs': torch.cat([inputs, _inside(sizes, inputs)], dim=1)}


def _inside(sizes: list[Sequence[int]], inputs: Tensor) -> Tensor:
    """Return 1 in the first rows and columns of each image and 0 elsewhere, [B, 1, H, W]."""
    ends = torch.tensor([size[:2] for size in sizes], device=inputs.device)
    height, width = (torch.arange(n, device=inputs.device) for n in inputs.shape[2:])
    rows, columns = height < ends[:, :1], width < ends[:, 1:]
    return (rows[:, None, :, None] & columns[:, None, None, :]).to(inputs.dtype)
