"""Draw images or text from a trained model: a PNG or a text file."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from mmengine.config import Config, DictAction
from mmengine.registry import DATASETS, init_default_scope
from PIL import Image

from aft_mm.apis import ImageGenerator, TextGenerator
from aft_mm.engine.command_line import (
    CONFIG_ERRORS,
    DATA_ERRORS,
    check_checkpoint,
    check_config,
    check_data,
)
from aft_mm.engine.errors import UserError, one_sentence
from aft_mm.engine.image_sampling import given_rows
from aft_mm.visualization import draw_completions, draw_samples


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='path of the config file')
    parser.add_argument('checkpoint', help='path or http address of the checkpoint')
    parser.add_argument(
        '--out', required=True, metavar='FILE',
        help='.png for the images of an image model, .txt for the text of a text model')
    parser.add_argument('--num', type=int, help='how many; by default 16 images or 1 text')
    parser.add_argument(
        '--complete', nargs='?', type=float, const=0.5, metavar='KEEP',
        help='complete the first images of the test set, of which this share is given (0.5)')
    parser.add_argument('--prompt', help='text to continue')
    parser.add_argument(
        '--num-chars', type=int,
        help="bytes of text to draw; by default as many as the model's position table holds")
    parser.add_argument('--temperature', type=float, default=1.0, help='divides the logits')
    parser.add_argument('--top-k', type=int, help='draw among the k likeliest values only')
    parser.add_argument(
        '--top-p', type=float, help='draw among the likeliest values of this probability only')
    parser.add_argument('--greedy', action='store_true', help='take the likeliest value always')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--device', help='by default an accelerator if there is one')
    parser.add_argument(
        '--cfg-options', nargs='+', action=DictAction, default={}, metavar='KEY=VALUE',
        help='override entries of the config, such as test_dataloader.dataset.data_root=DIR')
    return parser.parse_args(argv)


def check_args(args: argparse.Namespace) -> Config:
    """Read the config and refuse arguments that do not suit its kind of model.

    Raises:
        UserError: an argument or a file cannot be used.
    """
    check_config(args.config)
    check_checkpoint(args.checkpoint)
    config = Config.fromfile(args.config)
    config.merge_from_dict(args.cfg_options)
    is_image = 'image_shape' in config
    suffix = '.png' if is_image else '.txt'
    if Path(args.out).suffix != suffix:
        raise UserError(f'--out needs a file name that ends in {suffix} for the model of '
                        f'{args.config}, but got {args.out!r}')
    for other in ('prompt', 'num_chars') if is_image else ('complete', ):
        if getattr(args, other) is not None:
            raise UserError(f'--{other.replace("_", "-")} has no meaning for the model of '
                            f'{args.config}')
    if args.num is not None and args.num < 1:
        raise UserError(f'--num must be at least 1, but got {args.num}')
    if args.complete is not None:
        given_rows(args.complete, config.image_shape[0])
        check_data(config, 'test')
    return config


def first_images(config: Config, num: int) -> np.ndarray:
    """The first ``num`` images of the test set: uint8 ``[num, H, W, C]``."""
    init_default_scope(config.get('default_scope', 'mmengine'))
    dataset = DATASETS.build(config.test_dataloader.dataset)
    num = min(num, len(dataset))
    return np.stack(
        [dataset[i]['inputs'].numpy().reshape(config.image_shape) for i in range(num)])


def draw_images(args: argparse.Namespace, config: Config, options: dict) -> None:
    generator = ImageGenerator(config, args.checkpoint, args.device)
    num = args.num or 16
    if args.complete is None:
        picture = draw_samples(generator.sample(num, **options))
    else:
        images = first_images(config, num)
        completed = generator.complete(images, args.complete, **options)
        rows = given_rows(args.complete, config.image_shape[0])
        picture = draw_completions(images, completed[:, None], rows)
    Image.fromarray(picture).save(args.out)


def write_text(args: argparse.Namespace, config: Config, options: dict) -> None:
    generator = TextGenerator(config, args.checkpoint, args.device)
    texts = [
        generator(args.prompt, args.num_chars, **{**options, 'seed': args.seed + i})
        for i in range(args.num or 1)
    ]
    Path(args.out).write_text(f'\n{"-" * 80}\n'.join(texts), encoding='utf-8')


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    options = dict(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, greedy=args.greedy,
        seed=args.seed)
    with one_sentence(*CONFIG_ERRORS, *DATA_ERRORS):
        config = check_args(args)
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        draw = draw_images if 'image_shape' in config else write_text
        draw(args, config, options)
    print(f'written to {args.out}')


if __name__ == '__main__':
    main()
