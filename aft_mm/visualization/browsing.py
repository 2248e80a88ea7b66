"""What a pipeline feeds a model, as pictures: boxes, masks, segment maps, text."""

import textwrap
from collections.abc import Sequence

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

# Okabe and Ito's colours, as in the pictures of classes.
COLOURS = ((230, 159, 0), (86, 180, 233), (0, 158, 115), (204, 121, 167), (0, 114, 178),
           (213, 94, 0), (240, 228, 66), (153, 153, 153))
# The fonts of boxes and text are in pixels.
FONT, FONT_SIZE, LINE = 'DejaVu Sans Mono', 11, 14
LEAST_EDGE = 160  # pixels, to which small images are enlarged


def enlarge(image: np.ndarray, edge: int = LEAST_EDGE) -> np.ndarray:
    """An image [H, W, C] by a whole factor, so that its longer edge has at least so many pixels."""
    factor = max(1, -(-edge // max(image.shape[:2])))
    return image.repeat(factor, axis=0).repeat(factor, axis=1)


def draw_instances(
    image: np.ndarray,
    boxes: Tensor,
    names: Sequence[str],
    masks: Tensor | None = None,
) -> np.ndarray:
    """Draw boxes with the names of their classes, and masks.

    Args:
        image: uint8 [H, W, 3], RGB.
        boxes: [N, 4], x1, y1, x2, y2 in pixels.
        names: N of them.
        masks: bool [N, H, W].

    Returns:
        uint8 [H, W, 3].

    Raises:
        ValueError: boxes, names and masks are not as many, or masks have another size.
    """
    from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

    if len(boxes) != len(names) or (masks is not None and masks.shape != (
            len(boxes), *image.shape[:2])):
        found = None if masks is None else list(masks.shape)
        raise ValueError(f'boxes, names and masks must be as many and masks of the size of the '
                         f'image {list(image.shape[:2])}, got {len(boxes)}, {len(names)} and '
                         f'{found}')
    picture = torch.from_numpy(image.copy()).permute(2, 0, 1)
    if not len(boxes):
        return image.copy()
    kinds = sorted(set(names))
    colours = [COLOURS[kinds.index(name) % len(COLOURS)] for name in names]
    if masks is not None:
        picture = draw_segmentation_masks(picture, masks, alpha=0.5, colors=colours)
    # torchvision refuses boxes without area, which a crop may leave.
    x1, y1, x2, y2 = boxes.unbind(1)
    boxes = torch.stack([x1, y1, torch.maximum(x1, x2), torch.maximum(y1, y2)], 1)
    picture = draw_bounding_boxes(picture, boxes, list(names), colours, width=2,
                                  font=findfont(FONT), font_size=FONT_SIZE)
    return picture.permute(1, 2, 0).numpy()


def draw_segments(image: np.ndarray, labels: np.ndarray, ignore: int = 255) -> np.ndarray:
    """Lay a colour per class over an image; pixels of ``ignore`` stay as they are.

    Args:
        image: uint8 [H, W, 3], RGB.
        labels: ints [H, W].
        ignore: the label that is none.

    Raises:
        ValueError: the sizes differ.
    """
    if labels.shape != image.shape[:2]:
        raise ValueError(f'labels must have the size of the image {list(image.shape[:2])}, got '
                         f'{list(labels.shape)}')
    # Beyond eight classes the colours come again, darker.
    colours = np.array(COLOURS)[labels % len(COLOURS)] / (1 + labels // len(COLOURS))[..., None]
    laid = (0.4 * image + 0.6 * colours).astype(np.uint8)
    return np.where((labels == ignore)[..., None], image, laid)


def draw_matrix(values: Tensor) -> np.ndarray:
    """Features over time, ``[T, F]``: uint8 [F', T', 3], time to the right, the first one lowest.

    From the smallest value (dark) to the largest (light).
    """
    picture = values.double().T.flip(0)
    low, high = picture.min(), picture.max()
    colours = colormaps['cividis'](((picture - low) / (high - low).clamp(min=1e-12)).numpy())
    return enlarge((255 * colours[..., :3]).round().astype(np.uint8))


def draw_text(text: str, columns: int = 64, rows: int = 12) -> np.ndarray:
    """Text in black on white, wrapped, at most so many lines: uint8 [H, W, 3]."""
    lines = [part for line in text.splitlines() for part in textwrap.wrap(
        line, columns, drop_whitespace=False, replace_whitespace=False) or ['']]
    if len(lines) > rows:
        lines = [*lines[:rows - 1], '…']
    font = ImageFont.truetype(findfont(FONT), FONT_SIZE)
    picture = Image.new('RGB', (int(columns * font.getlength('0')) + 8, LINE * rows + 8), 'white')
    draw = ImageDraw.Draw(picture)
    for index, line in enumerate(lines):
        draw.text((4, 4 + LINE * index), line, 'black', font)
    return np.asarray(picture)
