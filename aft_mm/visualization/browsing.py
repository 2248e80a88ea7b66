"""What a pipeline feeds a model, as pictures: boxes, masks, segment maps, text."""

import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

# Okabe and Ito's colours, as in the pictures of classes.
COLOURS = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (204, 121, 167),
    (0, 114, 178),
    (213, 94, 0),
    (240, 228, 66),
    (153, 153, 153),
)
# The fonts of boxes and text are in pixels.
FONT, FONT_SIZE, LINE = 'DejaVu Sans Mono', 11, 14
LEAST_EDGE = 160  # pixels, to which small images are enlarged
LARGE = 200  # pixels, from which on what is drawn over an image grows with it


def enlarge(image: np.ndarray, edge: int = LEAST_EDGE) -> np.ndarray:
    """An image [H, W, C] by a whole factor, so that its longer edge has at least so many pixels."""
    factor = max(1, -(-edge // max(image.shape[:2])))
    return image.repeat(factor, axis=0).repeat(factor, axis=1)


def draw_instances(
    image: np.ndarray,
    boxes: Tensor,
    names: Sequence[str],
    masks: Tensor | None = None,
    classes: Sequence[str] = (),
) -> np.ndarray:
    """Draw boxes with the names of their classes, and masks.

    Args:
        image: uint8 [H, W, 3], RGB.
        boxes: [N, 4], x1, y1, x2, y2 in pixels.
        names: N of them.
        masks: bool [N, H, W].
        classes: All names there are, in whose order they get their colours, so that these are the
            same in every picture; by default those of this one.

    Returns:
        uint8 [H, W, 3].

    Raises:
        ValueError: boxes, names and masks are not as many, or masks have another size.
    """
    if len(boxes) != len(names) or (
        masks is not None and masks.shape != (len(boxes), *image.shape[:2])
    ):
        found = None if masks is None else list(masks.shape)
        raise ValueError(
            f'boxes, names and masks must be as many and masks of the size of the '
            f'image {list(image.shape[:2])}, got {len(boxes)}, {len(names)} and '
            f'{found}'
        )
    kinds = list(dict.fromkeys([*classes, *sorted(set(names))]))
    colours = [COLOURS[kinds.index(name) % len(COLOURS)] for name in names]
    laid = image.copy()
    for mask, colour in zip(masks.numpy() if masks is not None else (), colours, strict=False):
        laid[mask] = (0.5 * laid[mask] + 0.5 * np.array(colour)).astype(np.uint8)
    picture = Image.fromarray(laid)
    draw = ImageDraw.Draw(picture)
    # A large image is drawn smaller than it is.
    scale = max(1, max(image.shape[:2]) / LARGE)
    font = ImageFont.truetype(findfont(FONT), FONT_SIZE * scale)
    for (x1, y1, x2, y2), colour in zip(boxes.tolist(), colours, strict=True):
        # A crop may leave boxes without area.
        draw.rectangle((x1, y1, max(x1, x2), max(y1, y2)), outline=colour, width=round(2 * scale))
    for (x1, y1, *_), name, colour in zip(boxes.tolist(), names, colours, strict=True):
        draw.text(
            (x1 + 2, y1 + 1), name, colour, font, stroke_width=round(2 * scale), stroke_fill='black'
        )
    return np.asarray(picture)


def draw_segments(
    image: np.ndarray, labels: np.ndarray, names: Sequence[str] = (), ignore: int = 255
) -> np.ndarray:
    """Lay a colour per class over an image, and name below it the classes that are there.

    Args:
        image: uint8 [H, W, 3], RGB.
        labels: ints [H, W].
        names: Of the classes; without, nothing is written.
        ignore: The label that is none, whose pixels stay as they are.

    Raises:
        ValueError: the sizes differ.
    """
    if labels.shape != image.shape[:2]:
        raise ValueError(
            f'labels must have the size of the image {list(image.shape[:2])}, got '
            f'{list(labels.shape)}'
        )
    colours = _class_colours(labels)
    laid = (0.4 * image + 0.6 * colours).astype(np.uint8)
    laid = np.where((labels == ignore)[..., None], image, laid)
    there = [int(label) for label in np.unique(labels) if label != ignore and label < len(names)]
    if not there:
        return laid
    return np.concatenate([laid, _legend(there, names, image.shape[1])])


def _class_colours(labels: np.ndarray) -> np.ndarray:
    """A colour per label, [..., 3]; beyond eight classes they come again, darker."""
    return np.array(COLOURS)[labels % len(COLOURS)] / (1 + labels // len(COLOURS))[..., None]


def _legend(labels: Sequence[int], names: Sequence[str], width: int) -> np.ndarray:
    """The names of some classes beside their colours, in lines of a width: uint8 [H, width, 3]."""
    scale = max(1, width / LARGE)
    font = ImageFont.truetype(findfont(FONT), FONT_SIZE * scale)
    line, gap = round(LINE * scale), round(LINE * scale / 2)
    places, x, y = [], gap, gap
    for label in labels:
        length = line + gap + round(font.getlength(names[label])) + gap
        if x + length > width and x > gap:
            x, y = gap, y + line + gap
        places.append((x, y))
        x += length
    picture = Image.new('RGB', (width, y + line + gap), 'white')
    draw = ImageDraw.Draw(picture)
    for label, (x, y) in zip(labels, places, strict=True):
        colour = tuple(_class_colours(np.array(label)).astype(int).tolist())
        draw.rectangle((x, y, x + line - 1, y + line - 1), colour)
        draw.text((x + line + gap, y), names[label], 'black', font)
    return np.asarray(picture)


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
    lines = [
        part
        for line in text.splitlines()
        for part in textwrap.wrap(line, columns, drop_whitespace=False, replace_whitespace=False)
        or ['']
    ]
    if len(lines) > rows:
        lines = [*lines[: rows - 1], '…']
    font = ImageFont.truetype(findfont(FONT), FONT_SIZE)
    size = int(columns * font.getlength('0')) + 8, LINE * max(4, len(lines)) + 8
    picture = Image.new('RGB', size, 'white')
    draw = ImageDraw.Draw(picture)
    for index, line in enumerate(lines):
        draw.text((4, 4 + LINE * index), line, 'black', font)
    return np.asarray(picture)
