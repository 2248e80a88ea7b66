import argparse
import base64
import gzip
import html
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mmengine.config import Config
from PIL import Image
from torch import Tensor

from aft_mm.apis import ImageClassifier, load_model
from aft_mm.config.reading import read_config
from aft_mm.errors import CONFIG_ERRORS, UserError, user_errors
from aft_mm.layers.block import kinds_of
from aft_mm.outputs import check_output
from aft_mm.visualization import mixers_with_bias

from . import footer
from .networks import by_layer, mixers_with_keys, record_outputs

MOST_NUMBERS = 2**25  # 134 MB, which a browser opens in seconds


class ExplorerLayer(NamedTuple):
    """The position bias w of a token mixer, [h, kernel_h, kernel_w] by offset or [h, T, T].

    The sum excludes later sources if ``causal``, and sources outside the kernel unless
    ``connected``. ``number`` is that of the block, by default the place in the page.
    """

    name: str
    bias: Tensor
    causal: bool = False
    connected: bool = True
    number: int | None = None


class ExplorerImage(NamedTuple):
    """An image, uint8 [H, W, 3], and its keys [T, channels] (or None) in each layer."""

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
    """Return the HTML page of a model on a grid (H, W).

    It shows w, and for each image ``e^k`` over its mean and the weights ``W e^k / Σ W e^k`` of a
    query.
    """
    num_tokens = num_prefix_tokens + grid[0] * grid[1]
    entries, biases = _layers(layers, images, num_tokens, grid)
    pictures, keys = _images(images, num_tokens)
    meta = dict(title=title, about=about, grid=list(grid), prefix=num_prefix_tokens)
    meta |= dict(layers=entries, images=pictures)
    folder = Path(__file__).parent
    page = (folder / 'explorer.html').read_text(encoding='utf-8')
    texts = dict(
        SCRIPT=(folder / 'explorer.js').read_text(encoding='utf-8'),
        TITLE=html.escape(title),
        # A name may contain a closing tag.
        META=json.dumps(meta, allow_nan=False).replace('<', r'\u003c'),
        BIASES=_packed(biases),
        KEYS=_packed(keys),
    )
    # One pass, because a layer may be called @BIASES@.
    return re.sub(f'@({"|".join(texts)})@', lambda match: texts[match[1]], page)


def _layers(
    layers: Sequence[ExplorerLayer],
    images: Sequence[ExplorerImage],
    num_tokens: int,
    grid: Sequence[int],
) -> tuple[list[dict], np.ndarray]:
    entries, biases = [], []
    start = 0
    for i, layer in enumerate(layers):
        w = layer.bias.detach().cpu().float().numpy()
        if not np.isfinite(w).all():
            raise UserError(f'the bias of {layer.name} must be finite, got NaN or inf')
        dense = w.ndim == 3 and w.shape[1:] == (num_tokens, num_tokens)
        if w.ndim != 3 or not (dense or (w.shape[1] % 2 and w.shape[2] % 2)):
            raise UserError(
                f'the bias of {layer.name} must be [h, kernel_h, kernel_w] with odd '
                f'sizes or [h, {num_tokens}, {num_tokens}] for the grid {tuple(grid)}, '
                f'got {list(w.shape)}'
            )
        channels = [key.shape[1] for image in images if (key := image.keys[i]) is not None]
        entries.append(
            dict(
                name=layer.name,
                number=i if layer.number is None else layer.number,
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
                f'layers must hold at most {MOST_NUMBERS:,} numbers, got {start:,} in the first '
                f'{i + 1}'
            )
        biases.append(w.ravel())
    return entries, np.concatenate(biases).astype('<f4')


def _images(images: Sequence[ExplorerImage], num_tokens: int) -> tuple[list[dict], np.ndarray]:
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
                    f'{list(key.shape)}'
                )
            values = key.detach().cpu().double().numpy().T
            if not np.isfinite(values).all():
                raise UserError(f'the keys of {image.name} must be finite, got NaN or inf')
            low = float(values.min())
            step = (float(values.max()) - low) / 65535 or 1.0
            parts.append(np.rint((values - low) / step).astype('<u2').ravel())
            places.append(dict(start=start, low=low, step=step))
            start += values.size
        file = io.BytesIO()
        Image.fromarray(image.image).save(file, 'PNG')
        data = 'data:image/png;base64,' + base64.b64encode(file.getvalue()).decode()
        pictures.append(dict(name=image.name, data=data, keys=places))
    return pictures, np.concatenate(parts)


def _packed(values: np.ndarray) -> str:
    return base64.b64encode(gzip.compress(values.tobytes(), mtime=0)).decode()


def layers_of(mixers: dict[str, Any], config: Config) -> list[ExplorerLayer]:
    if not mixers:
        raise UserError(f'the model of {config.filename} has no token mixer with a position bias')
    grids = {mixer.grid for mixer in mixers.values()}
    if len(grids) > 1 or len(next(iter(grids)) or ()) != 2:
        raise UserError(
            f'the page needs position biases on one 2-d grid, got {grids} in {config.filename}; '
            'use `aft_mm plot bias`'
        )
    return [
        ExplorerLayer(
            name,
            mixer.position_bias(),
            mixer.causal,
            getattr(mixer, 'global_connectivity', True),
            number,
        )
        for number, (name, mixer) in zip(by_layer(mixers), mixers.items(), strict=True)
    ]


def keys_of(classifier: ImageClassifier, path: str, mixers: dict[str, Any]) -> ExplorerImage:
    inputs = classifier.preprocess(path)['inputs']
    mixer = next(iter(mixers.values()))
    grid = classifier.model.backbone.patch_embed.grid_of(*inputs.shape[1:])
    if grid != mixer.grid:
        raise UserError(
            f'image {path!r} must have a grid of {mixer.grid} tokens like the biases, got {grid}; '
            'give one of another size'
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
    return ExplorerImage(
        f'{Path(path).name}: {", ".join(classifier.captions(result))}',
        pixels.copy(),
        [keys[name][0] if name in keys else None for name in mixers],
    )


def run(args: argparse.Namespace) -> None:
    with user_errors(*CONFIG_ERRORS):
        check_output('--out', args.out, ('.html',))
        config = read_config(args.config)
        if args.images:
            classifier = ImageClassifier(config, args.checkpoint, 'cpu')
            model = classifier.model
        else:
            _, model = load_model(config, args.checkpoint, 'cpu')
        mixers = mixers_with_bias(model)
        layers = layers_of(mixers, config)
        images = [keys_of(classifier, path, mixers) for path in args.images]
        mixer = next(iter(mixers.values()))
        about = (
            f'{kinds_of(mixers.values())}, {len(layers)} layers · '
            f'{footer(args.config, args.checkpoint)}'
        )
        layout = mixer.grid, mixer.num_prefix_tokens
        page = explorer_page(layers, *layout, images, Path(args.config).stem, about)
        Path(args.out).write_text(page, encoding='utf-8')
    print(
        f'wrote {len(layers)} layers and {len(images)} images to {args.out} '
        f'({len(page.encode()) / 1e6:.1f} MB)'
    )
