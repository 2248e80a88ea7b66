from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from aft_mm.checks import check_int, check_number, check_sizes
from aft_mm.errors import UserError
from aft_mm.images import enlarge_bicubic

GREY = 127  # pixels hidden from the model
HEADER = 20  # pixels
CELL = 96  # minimum width of a picture in a grid, in pixels


def check_image_shape(model: Any, image_shape: Sequence[int]) -> None:
    """Raise a UserError unless images (H, W, C) have as many values as the sequences of ``model``."""
    values = model.decoder.max_length * model.head.dims_per_token
    check_sizes('image_shape (H, W, C)', image_shape, (3,))
    if np.prod(image_shape) != values:
        raise UserError(
            f'image_shape must be (H, W, C) with H·W·C = {values}, the size of the '
            f"model's position table, got {tuple(image_shape)}"
        )


def sample_images(model: Any, image_shape: Sequence[int], num: int, **options: Any) -> np.ndarray:
    """Sample images.

    Args:
        model: An autoregressive model without an encoder.
        image_shape: (H, W, C).
        **options: Passed to ``model.generate``.

    Returns:
        uint8 ``[num, H, W, C]``.

    Raises:
        UserError: The model was built for another ``image_shape``.
    """
    check_image_shape(model, image_shape)
    check_int('num', num, 1)
    tokens = model.generate(model.decoder.max_length, batch_size=num, **options)
    return to_images(tokens, image_shape)


def complete_images(
    model: Any, images: np.ndarray, num_given_rows: int, **options: Any
) -> np.ndarray:
    """Sample the rest of images from their first rows.

    Args:
        model: An autoregressive model without an encoder.
        images: uint8 ``[N, H, W, C]``.
        num_given_rows: Rows from the top that the model is given, 1 to H − 1.
        **options: As for :func:`sample_images`.

    Returns:
        uint8 ``[N, H, W, C]``.
    """
    image_shape = images.shape[1:]
    check_image_shape(model, image_shape)
    if not len(images):
        raise UserError('images must hold at least one image, got none')
    height = image_shape[0]
    check_int('num_given_rows', num_given_rows)
    if not 1 <= num_given_rows < height:
        raise UserError(
            f'num_given_rows must be 1 to {height - 1} for an image of {height} rows, '
            f'got {num_given_rows}'
        )
    token_shape: tuple[int, ...] = model.head.token_shape
    tokens = torch.from_numpy(images.astype(np.int64)).reshape(len(images), -1, *token_shape)
    length = tokens.shape[1]
    prompts = tokens[:, : length * num_given_rows // height]
    return to_images(model.generate(length, prompts=prompts, **options), image_shape)


def given_rows(keep: float, height: int) -> int:
    """Convert a share of an image into rows; raise a UserError if no row is given or none left."""
    check_number('keep (--complete)', keep)
    rows = round(keep * height)
    if not 1 <= rows < height:
        raise UserError(
            f'keep (--complete) must be the share of 1 to {height - 1} of {height} '
            f'rows, between 0 and 1, got {keep}'
        )
    return rows


def to_images(tokens: torch.Tensor, image_shape: Sequence[int]) -> np.ndarray:
    return tokens.cpu().numpy().astype(np.uint8).reshape(len(tokens), *image_shape)


def draw_samples(
    images: np.ndarray, columns: int | None = None, scale: int | None = None
) -> np.ndarray:
    """Arrange images in a grid, two pixels apart on white.

    Args:
        images: uint8 ``[N, H, W, C]``, C = 1 or 3 (RGB).
        columns: Images per row; by default the grid is as square as possible.
        scale: Integer magnification; by default images become at least 96 pixels wide.

    Returns:
        uint8 ``[H', W', 3]``.
    """
    # The tools check first that torchvision matches torch.
    from torchvision.utils import make_grid

    images = np.asarray(images)
    if images.ndim != 4 or images.shape[-1] not in (1, 3) or images.dtype != np.uint8:
        raise ValueError(
            'images must be uint8 [N, H, W, C] with 1 or 3 channels, got '
            f'{images.dtype} {list(images.shape)}'
        )
    if not len(images):
        raise ValueError('images must hold at least one image, got none')
    columns = columns or int(np.ceil(np.sqrt(len(images))))
    scale = scale or -(-CELL // images.shape[2])
    large = images.repeat(scale, axis=1).repeat(scale, axis=2).transpose(0, 3, 1, 2)
    grid = make_grid(torch.from_numpy(large), nrow=columns, padding=2, pad_value=255)
    return grid.permute(1, 2, 0).numpy()


def draw_completions(
    images: np.ndarray, completions: np.ndarray, num_given_rows: int, scale: int | None = None
) -> np.ndarray:
    """Arrange one row per image: the given part, its K completions, the original.

    Args:
        images: uint8 ``[N, H, W, C]``.
        completions: uint8 ``[N, K, H, W, C]``.
        num_given_rows: Rows from the top that the model was given; others are grey.
        scale: As for :func:`draw_samples`.

    Returns:
        uint8 ``[H', W', 3]``, K + 2 pictures per row.
    """
    images, completions = np.asarray(images), np.asarray(completions)
    given = images.copy()
    given[:, num_given_rows:] = GREY
    rows = np.concatenate([given[:, None], completions, images[:, None]], axis=1)
    return draw_samples(rows.reshape(-1, *images.shape[1:]), columns=rows.shape[1], scale=scale)


def draw_header(names: Sequence[str], width: int) -> np.ndarray:
    """Draw column titles, black on white: uint8 ``[20, width, 3]``."""
    picture = Image.new('RGB', (width, HEADER), 'white')
    draw, column = ImageDraw.Draw(picture), width / len(names)
    for size in range(13, 5, -1):  # the largest at which the longest fits
        font = ImageFont.load_default(size=size)  # has no ×
        if max(map(font.getlength, names)) < column:
            break
    for index, name in enumerate(names):
        draw.text(((index + 0.5) * column, HEADER / 2), name, 'black', font, anchor='mm')
    return np.asarray(picture)


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
    samples: np.ndarray,
    targets: np.ndarray | None = None,
) -> np.ndarray:
    """Arrange one row per input: the input, its bicubic upscaling, the samples, the original.

    Args:
        inputs: uint8 ``[N, h, w, C]``, C = 1 or 3 (RGB).
        samples: uint8 ``[N, K, H, W, C]``.
        targets: uint8 ``[N, H, W, C]``, the originals; None omits the column.

    Returns:
        uint8 ``[H', W', 3]``.

    Raises:
        ValueError: The shapes do not match, or as for :func:`draw_samples`.
    """
    inputs, samples = np.asarray(inputs), np.asarray(samples)
    factor = _factor(inputs, samples)
    image_shape = samples.shape[2:]
    targets = (
        np.empty((len(inputs), 0, *image_shape), np.uint8)
        if targets is None
        else np.asarray(targets)[:, None]
    )
    large = inputs.repeat(factor, axis=1).repeat(factor, axis=2)
    smooth = np.stack([enlarge_bicubic(image, image_shape[:2]) for image in inputs])
    rows = np.concatenate([large[:, None], smooth[:, None], samples, targets], axis=1)
    grid = draw_samples(rows.reshape(-1, *image_shape), columns=rows.shape[1])
    names = [
        f'input {inputs.shape[1]}x{inputs.shape[2]}',
        'bicubic',
        *(f'sample {i + 1}' if samples.shape[1] > 1 else 'sample' for i in range(samples.shape[1])),
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
