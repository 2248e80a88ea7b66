"""Images from an autoregressive model and back: whole samples and completions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from aft_mm.checks import check_int, check_number, check_sizes
from aft_mm.errors import UserError


def check_image_shape(model: nn.Module, image_shape: Sequence[int]) -> None:
    """Compare an image with the sequences that ``model`` is made for.

    Raises:
        UserError: images of ``image_shape`` (H, W, C) have another number of values.
    """
    values = model.decoder.max_length * model.head.dims_per_token
    check_sizes('image_shape (H, W, C)', image_shape, (3,))
    if np.prod(image_shape) != values:
        raise UserError(
            f'image_shape must be (H, W, C) with H·W·C = {values}, the size of the '
            f"model's position table, got {tuple(image_shape)}"
        )


def sample_images(
    model: nn.Module, image_shape: Sequence[int], num: int, **options: Any
) -> np.ndarray:
    """Draw ``num`` images of shape (H, W, C): uint8 ``[num, H, W, C]``.

    ``options`` are those of ``model.generate``: temperature, top_k, top_p, greedy, seed, progress.

    Raises:
        UserError: the model is made for another ``image_shape``.
        ValueError: ``num`` or an option is out of range.
    """
    check_image_shape(model, image_shape)
    check_int('num', num, 1)
    tokens = model.generate(model.decoder.max_length, batch_size=num, **options)
    return to_images(tokens, image_shape)


def complete_images(
    model: nn.Module, images: np.ndarray, num_given_rows: int, **options: Any
) -> np.ndarray:
    """Draw what is below the first ``num_given_rows`` rows of images, uint8 ``[N, H, W, C]``.

    ``options`` as in :func:`sample_images`.

    Raises:
        UserError: the model is made for images of another shape, there is no image, or
            ``num_given_rows`` is not in 1..H−1.
        ValueError: ``num`` or an option is out of range.
    """
    image_shape = images.shape[1:]
    check_image_shape(model, image_shape)
    if not len(images):
        raise UserError('images must hold at least one image, but is empty')
    height = image_shape[0]
    check_int('num_given_rows', num_given_rows)
    if not 1 <= num_given_rows < height:
        raise UserError(
            f'a completion needs 1 to {height - 1} given rows of an image of '
            f'{height}, got {num_given_rows}'
        )
    token_shape: tuple[int, ...] = model.head.token_shape
    tokens = torch.from_numpy(images.astype(np.int64)).reshape(len(images), -1, *token_shape)
    length = tokens.shape[1]
    prompts = tokens[:, : length * num_given_rows // height]
    return to_images(model.generate(length, prompts=prompts, **options), image_shape)


def given_rows(keep: float, height: int) -> int:
    """The rows of an image of ``height`` rows that the share ``keep`` stands for.

    Raises:
        UserError: no row would be given, or none would be left to draw.
    """
    check_number('keep (--complete)', keep)
    rows = round(keep * height)
    if not 1 <= rows < height:
        raise UserError(
            f'keep (--complete) must be the share of 1 to {height - 1} of {height} '
            f'rows, between 0 and 1, got {keep}'
        )
    return rows


def to_images(tokens: torch.Tensor, image_shape: Sequence[int]) -> np.ndarray:
    """Tokens ``[N, T]`` or ``[N, T, C]`` in raster order as uint8 ``[N, H, W, C]``."""
    return tokens.cpu().numpy().astype(np.uint8).reshape(len(tokens), *image_shape)
