"""One HTML page to explore the position biases and keys of a model, without a network."""

import base64
import gzip
import html
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

_FOLDER = Path(__file__).parent
#: Numbers that a browser opens in seconds, 134 MB.
MOST_NUMBERS = 2**25


class ExplorerLayer(NamedTuple):
    """What the page shows of a token mixer.

    ``bias`` is w, [h, kernel_h, kernel_w] by offset or [h, T, T] with T = P + H·W for P prefix
    tokens. With ``causal`` the sources after the query in raster order are not summed over, without
    ``connected`` those outside the kernel are not.
    """

    name: str
    bias: Tensor
    causal: bool = False
    connected: bool = True


class ExplorerImage(NamedTuple):
    """An image, uint8 [H, W, 3], and what each layer projects of it: keys [T, channels] or None."""

    name: str
    image: np.ndarray
    keys: Sequence[Tensor | None]


def explorer_page(
    layers: Sequence[ExplorerLayer],
    grid: Sequence[int],
    num_prefix_tokens: int = 0,
    images: Sequence[ExplorerImage] = (),
    title: str = 'Position biases',
    about: str = '',
) -> str:
    """The page as a text, to be written to a file that a browser opens from disk.

    It shows w of all layers and heads side by side, ``w[t, t']`` of a query over the grid, the
    kernel of a head, and of each image ``e^k`` over its mean and the share of each source in the
    sum of the query, ``W e^k / Σ W e^k``. Biases are kept in float32, keys of an image and layer in
    2^16 steps between the least and the largest.

    Args:
        layers: In the order of the model.
        grid: (H, W) of the tokens.
        num_prefix_tokens: P class tokens in front; sources only, and not drawn.
        images: To look at keys with.
        title, about: The head of the page, and a line below it.

    Raises:
        ValueError: there is no layer, they hold more than 2^25 numbers, the grid is not of two
            dimensions, or a bias or keys do not fit it.
    """
    if len(grid) != 2:
        raise ValueError(f'grid must have two dimensions, got {tuple(grid)}.')
    if not layers:
        raise ValueError('layers must hold at least one, but it is empty.')
    num_tokens = num_prefix_tokens + grid[0] * grid[1]
    entries, biases = _layers(layers, images, num_tokens, grid)
    pictures, keys = _images(images, num_tokens)
    meta = dict(
        title=title,
        about=about,
        grid=list(grid),
        prefix=num_prefix_tokens,
        layers=entries,
        images=pictures,
    )
    page = (_FOLDER / 'explorer.html').read_text(encoding='utf-8')
    for name, text in (
        ('SCRIPT', (_FOLDER / 'explorer.js').read_text(encoding='utf-8')),
        ('TITLE', html.escape(title)),
        # A name may hold what would end the element.
        ('META', json.dumps(meta).replace('<', r'\u003c')),
        ('BIASES', _packed(biases)),
        ('KEYS', _packed(keys)),
    ):
        page = page.replace(f'@{name}@', text)
    return page


def _layers(
    layers: Sequence[ExplorerLayer],
    images: Sequence[ExplorerImage],
    num_tokens: int,
    grid: Sequence[int],
) -> tuple[list[dict], np.ndarray]:
    """What the page has to know of the layers, and their biases one after the other."""
    entries, biases = [], []
    start = 0
    for i, layer in enumerate(layers):
        w = layer.bias.detach().cpu().float().numpy()
        dense = w.ndim == 3 and w.shape[1:] == (num_tokens, num_tokens)
        if w.ndim != 3 or not (dense or (w.shape[1] % 2 and w.shape[2] % 2)):
            raise ValueError(
                f'the bias of {layer.name} must be [h, kernel_h, kernel_w] with odd '
                f'sizes or [h, {num_tokens}, {num_tokens}] of the grid {tuple(grid)}, '
                f'got {list(w.shape)}.'
            )
        channels = [image.keys[i].shape[1] for image in images if image.keys[i] is not None]
        entries.append(
            dict(
                name=layer.name,
                heads=len(w),
                start=start,
                kernel=None if dense else w.shape[1:],
                causal=layer.causal,
                connected=layer.connected,
                low=float(w.min()),
                high=float(w.max()),
                keyChannels=channels[0] if channels else len(w),
            )
        )
        start += w.size
        if start > MOST_NUMBERS:
            raise ValueError(
                f'layers must hold at most {MOST_NUMBERS:,} numbers, but the first '
                f'{i + 1} hold {start:,}.'
            )
        biases.append(w.ravel())
    return entries, np.concatenate(biases).astype('<f4')


def _images(images: Sequence[ExplorerImage], num_tokens: int) -> tuple[list[dict], np.ndarray]:
    """What the page has to know of the images, and the steps of their keys, [channels, T] each."""
    pictures: list[dict] = []
    parts = [np.empty(0, '<u2')]
    start = 0
    for image in images:
        places: list[dict | None] = []
        for key in image.keys:
            if key is None:
                places.append(None)
                continue
            if key.dim() != 2 or len(key) != num_tokens:
                raise ValueError(
                    f'the keys of {image.name} must be [{num_tokens}, channels], got '
                    f'{list(key.shape)}.'
                )
            values = key.detach().cpu().double().numpy().T
            low = float(values.min())
            step = (float(values.max()) - low) / 65535 or 1.0
            parts.append(np.rint((values - low) / step).astype('<u2').ravel())
            places.append(dict(start=start, low=low, step=step))
            start += values.size
        pictures.append(dict(name=image.name, data=_png(image.image), keys=places))
    return pictures, np.concatenate(parts)


def _png(image: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(image).save(file, 'PNG')
    return 'data:image/png;base64,' + base64.b64encode(file.getvalue()).decode()


def _packed(values: np.ndarray) -> str:
    return base64.b64encode(gzip.compress(values.tobytes(), mtime=0)).decode()
