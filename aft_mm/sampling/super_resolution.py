"""Images from smaller ones by an autoregressive model with an encoder."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from aft_mm.checks import check_int, check_sizes
from aft_mm.errors import UserError

from .images import check_image_shape, to_images


def check_super_resolution(
    model: nn.Module, image_shape: Sequence[int], source_shape: Sequence[int]
) -> None:
    """Compare images and their inputs with the sequences that ``model`` is made for.

    Raises:
        UserError: the model has no encoder, images of ``image_shape`` (H, W, C) or inputs of
            ``source_shape`` (h, w, C) have another number of values, or H and W are not the same
            multiple of h and w.
    """
    check_image_shape(model, image_shape)
    if model.encoder is None:
        raise UserError('super-resolution needs a model with an encoder, but it has none')
    values = model.encoder.max_length * int(np.prod(model.encoder.embedding.token_shape))
    check_sizes('source_shape (h, w, C)', source_shape, (3,))
    if np.prod(source_shape) != values:
        raise UserError(
            f'source_shape must be (h, w, C) with h·w·C = {values}, the size of the '
            f"position table of the model's encoder, got {tuple(source_shape)}"
        )
    factor = image_shape[0] // source_shape[0]
    if tuple(image_shape) != (factor * source_shape[0], factor * source_shape[1], source_shape[2]):
        raise UserError(
            f'image_shape must be source_shape {tuple(source_shape)} with height and '
            f'width times a whole number, got {tuple(image_shape)}'
        )


def super_resolve(
    model: nn.Module, images: np.ndarray, image_shape: Sequence[int], num: int = 1, **options: Any
) -> np.ndarray:
    """Draw ``num`` large images of each small one: uint8 ``[N, num, H, W, C]``.

    Args:
        model: With an encoder.
        images: uint8 ``[N, h, w, C]``.
        image_shape: ``(H, W, C)`` of what is drawn.
        num: Samples of each image.
        **options: Those of ``model.generate``: temperature, top_k, top_p, greedy, seed, progress.

    Raises:
        UserError: the model is made for other shapes, or there is no image.
        ValueError: ``num`` or an option is out of range.
    """
    check_super_resolution(model, image_shape, images.shape[1:])
    if not len(images):
        raise UserError('images must hold at least one image, but is empty')
    check_int('num', num, 1)
    token_shape: tuple[int, ...] = model.encoder.embedding.token_shape
    source = torch.from_numpy(images.astype(np.int64)).reshape(len(images), -1, *token_shape)
    tokens = model.generate(
        model.decoder.max_length, source=source.repeat_interleave(num, dim=0), **options
    )
    return to_images(tokens, image_shape).reshape(len(images), num, *image_shape)
