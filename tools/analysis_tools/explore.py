"""Write one HTML page to explore the position biases of a checkpoint, and its keys of images.

    python tools/analysis_tools/explore.py CONFIG CHECKPOINT a.jpg b.jpg --out page.html

A browser opens it from disk; it loads nothing.
"""

import argparse
import base64
import gzip
import html
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from aft_mm.cli.arguments import check_output
from aft_mm.errors import UserError, one_sentence


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', help='path of the config')
    parser.add_argument('checkpoint', help='path of the checkpoint, as tools/train.py writes it')
    parser.add_argument('images', nargs='*', help='image files whose keys are shown; a classifier')
    parser.add_argument('--out', required=True, metavar='HTML', help='where the page goes')
    return parser.parse_intermixed_args(argv)


if __name__ == '__main__':
    parse_args()  # --help and a wrong argument end before the slow imports


import numpy as np
from mmengine.config import Config
from PIL import Image
from recording import mixers_with_keys, record_outputs
from torch import Tensor, nn

from aft_mm.apis import ImageClassifier, load_model
from aft_mm.cli.command_line import CONFIG_ERRORS, read_config
from aft_mm.cli.pictures import footer
from aft_mm.visualization import mixers_with_bias

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
        raise UserError(f'grid must have two dimensions, got {tuple(grid)}.')
    if not layers:
        raise UserError('layers must hold at least one, but it is empty.')
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
            raise UserError(
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
            raise UserError(
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
                raise UserError(
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


def layers_of(mixers: dict[str, nn.Module], config: Config) -> list[ExplorerLayer]:
    """The biases of the mixers.

    Raises:
        UserError: there are none, or they are not on one grid of two dimensions.
    """
    if not mixers:
        raise UserError(f'the model of {config.filename} has no token mixer with a position bias')
    grids = {mixer.grid for mixer in mixers.values()}
    if len(grids) > 1 or len(next(iter(grids)) or ()) != 2:
        raise UserError(
            'explore.py shows biases on one grid of two dimensions, but the tokens of '
            f'{config.filename} are on {grids}; plot_position_bias.py draws those'
        )
    return [
        ExplorerLayer(
            name, mixer.position_bias(), mixer.causal, getattr(mixer, 'global_connectivity', True)
        )
        for name, mixer in mixers.items()
    ]


def look_at(classifier: ImageClassifier, path: str, mixers: dict[str, nn.Module]) -> ExplorerImage:
    """An image as the model sees it, with the keys of each mixer.

    Raises:
        UserError: it is no image, or has another grid of tokens than the biases.
    """
    inputs = classifier.preprocess(path)['inputs']
    mixer = next(iter(mixers.values()))
    grid = classifier.model.backbone.patch_embed.grid_of(*inputs.shape[1:])
    if grid != mixer.grid:
        raise UserError(
            f'image {path!r} has a grid of {grid} tokens in the model, but the biases '
            f'are of {mixer.grid}; give one of another size'
        )
    projections = {
        name: mixers[name].key for name in mixers_with_keys(classifier.model) if name in mixers
    }
    with record_outputs(projections) as keys:
        (result,) = classifier(path, progress=False)
    pixels = inputs.permute(1, 2, 0).numpy()
    if pixels.shape[2] == 1:
        pixels = pixels.repeat(3, axis=2)
    elif classifier.takes_bgr:
        pixels = pixels[..., ::-1]
    what = result['label'] if result['class_name'] is None else result['class_name']
    return ExplorerImage(
        f'{Path(path).name}: {what}, score {result["score"]:.2f}',
        pixels.copy(),
        [keys[name][0] if name in keys else None for name in mixers],
    )


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)

    with one_sentence(*CONFIG_ERRORS):
        check_output('--out', args.out, ('.html',))
        config = read_config(args.config)
        if args.images:
            classifier = ImageClassifier(config, args.checkpoint, 'cpu')
            model = classifier.model
        else:
            _, model = load_model(config, args.checkpoint, 'cpu')
        mixers = mixers_with_bias(model)
        layers = layers_of(mixers, config)
        images = [look_at(classifier, path, mixers) for path in args.images]
        mixer = next(iter(mixers.values()))
        about = (
            f'{type(mixer).__name__}, {len(layers)} layers · {footer(args.config, args.checkpoint)}'
        )
        page = explorer_page(
            layers,
            mixer.grid,
            mixer.num_prefix_tokens,
            images,
            title=Path(args.config).stem,
            about=about,
        )
        Path(args.out).write_text(page, encoding='utf-8')
    print(
        f'{len(layers)} layers and {len(images)} images written to {args.out}, '
        f'{len(page.encode()) / 1e6:.1f} MB'
    )


if __name__ == '__main__':
    main()
