from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from aft_mm.checks import check_int, check_sizes
from aft_mm.errors import UserError
from aft_mm.images import enlarge_bicubic

from .images import check_image_shape, draw_header, draw_samples, to_images


def check_super_resolution(
    model: Any, image_shape: Sequence[int], source_shape: Sequence[int]
) -> None:
    """Raise a UserError unless images (H, W, C) and inputs (h, w, C) fit each other and ``model``."""
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
    model: Any, images: np.ndarray, image_shape: Sequence[int], num: int = 1, **options: Any
) -> np.ndarray:
    """Sample ``num`` enlargements of each image.

    Args:
        model: An autoregressive model with an encoder.
        images: uint8 ``[N, h, w, C]``.
        image_shape: ``(H, W, C)`` of the enlargements.
        **options: Passed to ``model.generate``.

    Returns:
        uint8 ``[N, num, H, W, C]``.

    Raises:
        UserError: The model was built for other shapes, or there is no image.
        ValueError: ``num`` or an option is out of range.
    """
    check_super_resolution(model, image_shape, images.shape[1:])
    if not len(images):
        raise UserError('images must hold at least one image, got none')
    check_int('num', num, 1)
    token_shape: tuple[int, ...] = model.encoder.embedding.token_shape
    source = torch.from_numpy(images.astype(np.int64)).reshape(len(images), -1, *token_shape)
    tokens = model.generate(
        model.decoder.max_length, source=source.repeat_interleave(num, dim=0), **options
    )
    return to_images(tokens, image_shape).reshape(len(images), num, *image_shape)


def draw_super_resolution(
    inputs: np.ndarray,
    samples: np.ndarray | Mapping[str, np.ndarray],
    targets: np.ndarray | None = None,
) -> np.ndarray:
    """Arrange one row per input: the input, its bicubic upscaling, the samples, the original.

    Args:
        inputs: uint8 ``[N, h, w, C]``, C = 1 or 3 (RGB).
        samples: uint8 ``[N, K, H, W, C]``, or a mapping from model names to such arrays, drawn next
            to each other.
        targets: uint8 ``[N, H, W, C]``, the originals; None omits the column.

    Returns:
        uint8 ``[H', W', 3]``.

    Raises:
        ValueError: The shapes do not match, or as for :func:`draw_samples`.
    """
    inputs = np.asarray(inputs)
    models = samples if isinstance(samples, Mapping) else {'sample': samples}
    if not models:
        raise ValueError('samples must hold at least one model, got none')
    arrays = {name: np.asarray(array) for name, array in models.items()}
    factors = {_factor(inputs, array) for array in arrays.values()}
    if len(factors) > 1:
        raise ValueError(
            'samples of several models must have one size, got those of '
            f'{sorted(factors)} times the input'
        )
    factor = factors.pop()
    samples = np.concatenate(list(arrays.values()), axis=1)
    image_shape = samples.shape[2:]
    targets = (
        np.empty((len(inputs), 0, *image_shape), np.uint8)
        if targets is None
        else np.asarray(targets)[:, None]
    )
    if targets.shape != (len(inputs), targets.shape[1], *image_shape):
        raise ValueError(
            f'targets must be [N, H, W, C] of samples {list(samples.shape)}, got '
            f'{[len(targets), *targets.shape[2:]]}'
        )
    large = inputs.repeat(factor, axis=1).repeat(factor, axis=2)
    smooth = np.stack([enlarge_bicubic(image, image_shape[:2]) for image in inputs])
    rows = np.concatenate([large[:, None], smooth[:, None], samples, targets], axis=1)
    grid = draw_samples(rows.reshape(-1, *image_shape), columns=rows.shape[1])
    names = [
        f'input {inputs.shape[1]}x{inputs.shape[2]}',
        'bicubic',
        *(
            f'{name} {i + 1}' if array.shape[1] > 1 else name
            for name, array in arrays.items()
            for i in range(array.shape[1])
        ),
        *['original'] * targets.shape[1],
    ]
    return np.concatenate([draw_header(names, grid.shape[1]), grid])


def _factor(inputs: np.ndarray, samples: np.ndarray) -> int:
    if inputs.ndim == 4 and samples.ndim == 5 and len(inputs) == len(samples):
        factor = samples.shape[2] // max(1, inputs.shape[1])
        size = tuple(factor * edge for edge in inputs.shape[1:3])
        if factor and samples.shape[2:] == (*size, inputs.shape[3]):
            return factor
    raise ValueError(
        'samples must be [N, K, H, W, C] with H and W the same multiple of those of '
        f'inputs {list(inputs.shape)}, got {list(samples.shape)}'
    )
