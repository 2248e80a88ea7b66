import argparse
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont
from mmengine.config import Config
from mmengine.runner import set_random_seed
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from aft_mm.checks import check_int
from aft_mm.config.reading import data_sources, read_config
from aft_mm.config.texts import type_name
from aft_mm.errors import DATA_ERRORS, UserError, user_errors
from aft_mm.outputs import check_kept
from aft_mm.tokenizers import decode_points
from aft_mm.visualization import draw_header, draw_point_clouds
from aft_mm.visualization.figures import class_colours, new_figure, plain

from .networks import build_dataset, shown_image, spread_samples

FONT, FONT_SIZE, LINE = 'DejaVu Sans Mono', 11, 14  # pixels
IGNORED = 255  # label of pixels without a class
COLUMNS, ROWS = 64, 12  # of a text
LEAST_EDGE = 160  # pixels, to which small images are magnified
LARGE = 200  # pixels, above which fonts and lines grow with the image


def enlarge(image: np.ndarray, edge: int = LEAST_EDGE) -> np.ndarray:
    factor = max(1, -(-edge // max(image.shape[:2])))
    return image.repeat(factor, axis=0).repeat(factor, axis=1)


def draw_instances(
    image: np.ndarray,
    boxes: Tensor,
    names: Sequence[str],
    masks: Tensor | None = None,
    classes: Sequence[str] = (),
) -> np.ndarray:
    """Draw boxes [N, 4] (x1, y1, x2, y2 in pixels) with their names, and masks [N, H, W]."""
    kinds = list(dict.fromkeys([*classes, *sorted(set(names))]))
    of_kinds = dict(zip(kinds, map(tuple, class_colours(len(kinds)).tolist()), strict=True))
    colours = [of_kinds[name] for name in names]
    laid = image.copy()
    for mask, colour in zip(masks.numpy() if masks is not None else (), colours, strict=False):
        laid[mask] = (0.5 * laid[mask] + 0.5 * np.array(colour)).astype(np.uint8)
    picture = Image.fromarray(laid)
    draw = ImageDraw.Draw(picture)
    # Large images are reduced in the figure.
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


def draw_segments(image: np.ndarray, labels: np.ndarray, names: Sequence[str] = ()) -> np.ndarray:
    """Overlay an image with a colour per class of ``labels`` [H, W]; ``names`` give a legend below.

    Pixels labelled 255 belong to no class and keep their colour.
    """
    if labels.shape != image.shape[:2]:
        raise UserError(
            f'labels must have the size of the image {list(image.shape[:2])}, got '
            f'{list(labels.shape)}'
        )
    colours = _class_colours(labels)
    laid = (0.4 * image + 0.6 * colours).astype(np.uint8)
    laid = np.where((labels == IGNORED)[..., None], image, laid)
    there = [int(label) for label in np.unique(labels) if label != IGNORED and label < len(names)]
    if not there:
        return laid
    return np.concatenate([laid, _legend(there, names, image.shape[1])])


def _class_colours(labels: np.ndarray) -> np.ndarray:
    return class_colours(IGNORED + 1)[labels]


def _legend(labels: Sequence[int], names: Sequence[str], width: int) -> np.ndarray:
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
        colour = tuple(_class_colours(np.array(label)).tolist())
        draw.rectangle((x, y, x + line - 1, y + line - 1), colour)
        draw.text((x + line + gap, y), names[label], 'black', font)
    return np.asarray(picture)


def draw_matrix(values: Tensor) -> np.ndarray:
    picture = values.double().T.flip(0)
    low, high = picture.min(), picture.max()
    colours = colormaps['cividis'](((picture - low) / (high - low).clamp(min=1e-12)).numpy())
    return enlarge((255 * colours[..., :3]).round().astype(np.uint8))


def draw_text(text: str) -> np.ndarray:
    lines = [
        part
        for line in text.splitlines()
        for part in textwrap.wrap(line, COLUMNS, drop_whitespace=False, replace_whitespace=False)
        or ['']
    ]
    if len(lines) > ROWS:
        lines = [*lines[: ROWS - 1], '…']
    font = ImageFont.truetype(findfont(FONT), FONT_SIZE)
    size = int(COLUMNS * font.getlength('0')) + 8, LINE * max(4, len(lines)) + 8
    picture = Image.new('RGB', size, 'white')
    draw = ImageDraw.Draw(picture)
    for index, line in enumerate(lines):
        draw.text((4, 4 + LINE * index), line, 'black', font)
    return np.asarray(picture)


def draw_titled_images(
    images: Sequence[np.ndarray], titles: Sequence[str], title: str = '', footer: str = ''
) -> Figure:
    columns = int(np.ceil(np.sqrt(len(images))))
    rows = -(-len(images) // columns)
    aspect = max(image.shape[1] / image.shape[0] for image in images)
    figure = new_figure(1.8 * min(3.0, max(1.0, aspect)) * columns, 2.1 * rows + 0.6, title, footer)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes:
        axis.set_axis_off()
    for axis, image, words in zip(axes, images, titles, strict=False):
        axis.imshow(image, cmap='gray', vmin=0, vmax=255, interpolation='nearest')
        axis.set_title(plain(words), fontsize=6)
    return figure


MOST_TOKENS = 200  # tokens of a sequence of numbers


def load_annotations_first(config: Config, split: str) -> None:
    loader: Any = config.get(f'{split}_dataloader') or {}
    steps = loader.get('dataset', {}).get('pipeline') or []
    loading = [step for step in steps if type_name(step.get('type')).endswith('LoadAnnotations')]
    if loading and type_name(steps[0].get('type')).endswith('LoadImageFromFile'):
        others = [step for step in steps[1:] if step not in loading]
        loader.dataset.pipeline = [steps[0], *loading, *others]


def picture_of(config: Config, dataset: Any, sample: dict) -> tuple[np.ndarray, str]:
    known = sample['data_samples']
    names = (getattr(dataset, 'metainfo', None) or {}).get('classes') or ()
    if 'gt_label' in known:
        labels = ', '.join(name_of(names, index) for index in known.gt_label.tolist())
        return enlarge(shown_image(config, sample)), labels
    if 'gt_sem_seg' in known:
        image = shown_image(config, sample)
        labels = known.gt_sem_seg.data[0].numpy()
        there = np.setdiff1d(labels, IGNORED)
        count = int((there < len(names)).sum()) if names else len(there)
        return draw_segments(image, labels, names), f'{count} class' + 'es' * (count != 1)
    if 'gt_instances' in known:
        return with_instances(shown_image(config, sample), known, names)
    tokens = sample['inputs']
    title = f'{len(tokens)} tokens'
    if 'image_shape' in config:
        return as_image(config, tokens, known), title
    if 'point_cloud' in config:
        points = decode_points(tokens.numpy(), config.point_cloud.get('num_bits', 8))
        return draw_point_clouds([points], config.point_cloud.get('up', 'z')), (
            f'{len(points)} points'
        )
    if tokens.dim() == 2 and tokens.is_floating_point():
        text = known.get('text') or f'{len(tokens)} frames'
        return draw_matrix(tokens), text if len(text) <= 40 else text[:39] + '…'
    if tokens.dim() == 1:
        return as_text(dataset, tokens, known), title
    raise UserError(
        f'samples of {config.filename} must be images, text, point clouds or speech features, got '
        f'{tokens.dtype} {list(tokens.shape)}'
    )


def name_of(names: Sequence[str], index: int) -> str:
    return str(names[index]) if index < len(names) else str(index)


def with_instances(image: np.ndarray, known: Any, names: Sequence[str]) -> tuple[np.ndarray, str]:
    instances = known.gt_instances
    boxes = getattr(instances.bboxes, 'tensor', instances.bboxes)
    labels = [name_of(names, index) for index in instances.labels.tolist()]
    masks = instances.masks.to_tensor(torch.bool, 'cpu') if 'masks' in instances else None
    ignored = len(known.get('ignored_instances') or ())
    return draw_instances(image, boxes, labels, masks, names), (
        f'objects: {len(labels)}' + (f', {ignored} ignored' if ignored else '')
    )


def as_image(config: Config, tokens: torch.Tensor, known: Any) -> np.ndarray:
    def picture(values: torch.Tensor, shape: Sequence[int], edge: int = LEAST_EDGE) -> np.ndarray:
        image = values.numpy().astype(np.uint8).reshape(shape)
        return enlarge(np.broadcast_to(image, (*image.shape[:2], 3)), edge)

    target = picture(tokens, config.image_shape)
    if 'source' not in known:
        return target
    source = picture(known.source, config.source_shape, max(target.shape[:2]))
    pair = np.concatenate([source, np.full((len(source), 4, 3), 255, np.uint8), target], axis=1)
    return np.concatenate([draw_header(['input', 'target'], pair.shape[1]), pair])


def as_text(dataset: Any, tokens: torch.Tensor, known: Any) -> np.ndarray:
    given = known.get('num_context', 0)
    parts = [words_of(dataset, part) for part in (tokens[:given], tokens[given:]) if len(part)]
    words = ' | '.join(parts)
    return draw_text(
        f'{words_of(dataset, known.source)}\n→ {words}' if 'source' in known else words
    )


def words_of(dataset: Any, tokens: torch.Tensor) -> str:
    if type(dataset).__name__ == 'TextFile':
        return bytes(tokens.tolist()).decode('utf-8', 'replace')
    if hasattr(dataset, 'subwords'):
        return dataset.subwords.decode(tokens.tolist())
    return ' '.join(map(str, tokens[:MOST_TOKENS].tolist()))


def run(args: argparse.Namespace) -> None:
    with user_errors(*DATA_ERRORS):
        check_int('--seed', args.seed, 0)
        config = read_config(args.config)
        check_kept('--out', [args.out], data_sources(config))
        load_annotations_first(config, args.split)
        dataset = build_dataset(config, args.split)
        set_random_seed(args.seed)
        pictures = [
            picture_of(config, dataset, sample) for sample in spread_samples(dataset, args.num)
        ]
        images, titles = zip(*pictures, strict=True)
        title = f'{args.split} split, {len(dataset)} samples'
        figure = draw_titled_images(images, titles, title, config.filename.rpartition('/')[2])
        figure.savefig(args.out, dpi=args.dpi)
    print(f'plotted {len(images)} of {len(dataset)} samples to {args.out}')
