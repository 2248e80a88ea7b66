"""Grids of images that a model has drawn."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

GREY = 127  # what is hidden from the model
HEADER = 20  # pixels
CELL = 96  # pixels that a picture is wide at least


def enlarging(width: int) -> int:
    """The whole factor that makes a picture at least :data:`CELL` pixels wide."""
    return -(-CELL // width)


def draw_samples(
    images: np.ndarray, columns: int | None = None, scale: int | None = None
) -> np.ndarray:
    """Lay images out in a grid.

    Args:
        images: uint8 ``[N, H, W, C]``, C = 1 or 3 (RGB).
        columns: Images in a row; by default the grid is as square as it can be.
        scale: Every pixel becomes ``scale × scale`` pixels; by default as many as make an image at
            least 96 pixels wide.

    Returns:
        uint8 ``[H', W', 3]``, the images two pixels apart on white.

    Raises:
        ValueError: ``images`` has another shape or type, or holds no image.
    """
    # The tools look at torchvision, which may not fit torch, after they have imported this.
    from torchvision.utils import make_grid

    images = np.asarray(images)
    if images.ndim != 4 or images.shape[-1] not in (1, 3) or images.dtype != np.uint8:
        raise ValueError(
            'images must be uint8 [N, H, W, C] with 1 or 3 channels, got '
            f'{images.dtype} {list(images.shape)}.'
        )
    if not len(images):
        raise ValueError('images must hold at least one image, but it is empty.')
    columns = columns or int(np.ceil(np.sqrt(len(images))))
    scale = scale or enlarging(images.shape[2])
    large = images.repeat(scale, axis=1).repeat(scale, axis=2).transpose(0, 3, 1, 2)
    grid = make_grid(torch.from_numpy(large), nrow=columns, padding=2, pad_value=255)
    return grid.permute(1, 2, 0).numpy()


def draw_completions(
    images: np.ndarray, completions: np.ndarray, num_given_rows: int, scale: int | None = None
) -> np.ndarray:
    """One row per image: what was given, its completions, the image itself.

    Args:
        images: uint8 ``[N, H, W, C]``.
        completions: uint8 ``[N, K, H, W, C]``, K completions of each image.
        num_given_rows: Rows of an image, from the top, that the model was given; the rest of the
            first picture of a row is grey.
        scale: As in :func:`draw_samples`.

    Returns:
        uint8 ``[H', W', 3]``, K + 2 pictures in a row.

    Raises:
        ValueError: The shapes do not fit each other, or as in :func:`draw_samples`.
    """
    images, completions = np.asarray(images), np.asarray(completions)
    expected = (*images.shape[:1], *completions.shape[1:2], *images.shape[1:])
    if completions.shape != expected:
        raise ValueError(
            f'completions must be [N, K, H, W, C] of images {list(images.shape)}, but '
            f'is {list(completions.shape)}.'
        )
    given = images.copy()
    given[:, num_given_rows:] = GREY
    rows = np.concatenate([given[:, None], completions, images[:, None]], axis=1)
    return draw_samples(rows.reshape(-1, *images.shape[1:]), columns=rows.shape[1], scale=scale)


def draw_header(names: Sequence[str], width: int) -> np.ndarray:
    """Names over the middle of equal columns, black on white: uint8 ``[20, width, 3]``.

    They are as small as the longest one needs to stay in its column, down to 6 pixels.
    """
    picture = Image.new('RGB', (width, HEADER), 'white')
    draw, column = ImageDraw.Draw(picture), width / len(names)
    for size in range(13, 5, -1):
        font = ImageFont.load_default(size=size)  # has no ×
        if max(map(font.getlength, names)) < column:
            break
    for index, name in enumerate(names):
        draw.text(((index + 0.5) * column, HEADER / 2), name, 'black', font, anchor='mm')
    return np.asarray(picture)
