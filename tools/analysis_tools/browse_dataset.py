"""Draw what the pipeline of a config feeds its model: images, boxes, masks, text, clouds, sound.

Images are drawn after the pipeline and before they are normalised; what a data preprocessor adds
later, such as Mixup, is not there.

    python tools/analysis_tools/browse_dataset.py CONFIG --split train --num 9 --out samples.png
"""

import argparse
from collections.abc import Sequence

from aft_mm.cli.arguments import add_picture_arguments
from aft_mm.errors import UserError, user_errors


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', help='path of any config')
    parser.add_argument('--split', choices=('train', 'val', 'test'), default='train')
    parser.add_argument('--num', type=int, default=9, help='samples; %(default)s')
    parser.add_argument('--seed', type=int, default=0, help='of the random steps; %(default)s')
    add_picture_arguments(parser)
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()  # --help and a wrong argument end before the slow imports

import numpy as np
import torch
from mmengine.config import Config
from mmengine.runner import set_random_seed

from aft_mm.apis import build_dataset, shown_image, spread_samples
from aft_mm.checks import check_int
from aft_mm.cli.pictures import check_picture, save
from aft_mm.config.reading import read_config
from aft_mm.errors import DATA_ERRORS
from aft_mm.tokenizers import decode_points
from aft_mm.visualization import (
    draw_header,
    draw_instances,
    draw_matrix,
    draw_point_clouds,
    draw_segments,
    draw_text,
    draw_titled_images,
    enlarge,
)

#: Tokens of a sequence of numbers that are shown.
MOST_TOKENS = 200


def picture_of(config: Config, dataset, sample: dict) -> tuple[np.ndarray, str]:
    """A packed sample as a picture, uint8 [H, W, 3], and its title.

    Raises:
        UserError: there is no picture of this kind of sample.
    """
    known = sample['data_samples']
    names = (getattr(dataset, 'metainfo', None) or {}).get('classes') or ()
    if 'gt_label' in known:
        labels = ', '.join(name_of(names, index) for index in known.gt_label.tolist())
        return enlarge(shown_image(config, sample)), labels
    if 'gt_sem_seg' in known:
        image = shown_image(config, sample)
        labels = known.gt_sem_seg.data[0].numpy()
        there = np.setdiff1d(labels, 255)
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
        return draw_matrix(tokens), shortened(known.get('text') or f'{len(tokens)} frames')
    if tokens.dim() == 1:
        return as_text(dataset, tokens, known), title
    raise UserError(
        f'{config.filename} feeds its model a {tokens.dtype} {list(tokens.shape)} per '
        'sample, of which there is no picture'
    )


def name_of(names: Sequence[str], index: int) -> str:
    """The name of a class, or its number."""
    return str(names[index]) if index < len(names) else str(index)


def shortened(words: str, most: int = 40) -> str:
    """Words that fit over a picture."""
    return words if len(words) <= most else words[: most - 1] + '…'


def with_instances(image: np.ndarray, known, names: Sequence[str]) -> tuple[np.ndarray, str]:
    """Boxes and masks of mmdet over the image."""
    instances = known.gt_instances
    boxes = getattr(instances.bboxes, 'tensor', instances.bboxes)
    labels = [name_of(names, index) for index in instances.labels.tolist()]
    masks = instances.masks.to_tensor(torch.bool, 'cpu') if 'masks' in instances else None
    ignored = len(known.get('ignored_instances') or ())
    return draw_instances(image, boxes, labels, masks, names), (
        f'objects: {len(labels)}' + (f', {ignored} ignored' if ignored else '')
    )


def as_image(config: Config, tokens: torch.Tensor, known) -> np.ndarray:
    """The image that a sequence is, and beside it the one it is to be drawn from."""

    def picture(values: torch.Tensor, shape: Sequence[int]) -> np.ndarray:
        image = values.numpy().astype(np.uint8).reshape(shape)
        return enlarge(np.broadcast_to(image, (*image.shape[:2], 3)))

    drawn = picture(tokens, config.image_shape)
    if 'source' not in known:
        return drawn
    source = picture(known.source, config.source_shape)
    pair = np.concatenate([source, np.full((len(source), 4, 3), 255, np.uint8), drawn], axis=1)
    return np.concatenate([draw_header(['input', 'target'], pair.shape[1]), pair])


def as_text(dataset, tokens: torch.Tensor, known) -> np.ndarray:
    """Tokens in words; an arrow ends what they are made from, a bar what is only given."""
    given = known.get('num_context', 0)
    parts = [words_of(dataset, part) for part in (tokens[:given], tokens[given:]) if len(part)]
    words = ' | '.join(parts)
    return draw_text(
        f'{words_of(dataset, known.source)}\n→ {words}' if 'source' in known else words
    )


def words_of(dataset, tokens: torch.Tensor) -> str:
    """Bytes and subwords as the text that they are, other tokens as numbers."""
    if type(dataset).__name__ == 'TextFile':
        return bytes(tokens.tolist()).decode('utf-8', 'replace')
    if hasattr(dataset, 'subwords'):
        return dataset.subwords.decode(tokens.tolist())
    return ' '.join(map(str, tokens[:MOST_TOKENS].tolist()))


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with user_errors(*DATA_ERRORS):
        check_picture(args)
        check_int('--seed', args.seed, 0)
        config = read_config(args.config)
        dataset = build_dataset(config, args.split)
        set_random_seed(args.seed)
        pictures = [
            picture_of(config, dataset, sample) for sample in spread_samples(dataset, args.num)
        ]
        images, titles = zip(*pictures, strict=True)
        save(
            draw_titled_images(
                images,
                titles,
                f'{args.split} split, {len(dataset)} samples',
                config.filename.rpartition('/')[2],
            ),
            args,
        )
    print(f'{len(images)} of {len(dataset)} samples drawn to {args.out}')


if __name__ == '__main__':
    main()
