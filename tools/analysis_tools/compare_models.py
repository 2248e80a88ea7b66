"""Draw samples of several models for the same images next to each other.

The models are either super-resolution models or image models, which complete the lower part.

    python tools/analysis_tools/compare_models.py --num 8 --out faces.png \\
        --model local2d CONFIG CHECKPOINT --model transformer CONFIG CHECKPOINT
"""

import argparse
from collections.abc import Sequence

import numpy as np
from PIL import Image

from aft_mm.analysis import AtMost
from aft_mm.analysis.networks import build_dataset, spread_samples
from aft_mm.apis import ImageGenerator, SuperResolver
from aft_mm.apis.loading import task_of
from aft_mm.checks import check_int
from aft_mm.cli.arguments import tool_parser
from aft_mm.config.finding import check_checkpoint
from aft_mm.config.reading import read_config
from aft_mm.errors import DATA_ERRORS, UserError, user_errors
from aft_mm.outputs import check_output
from aft_mm.visualization import (
    draw_completions,
    draw_header,
    draw_super_resolution,
    given_rows,
    super_resolve,
)

KINDS = {'SuperResolver': SuperResolver, 'ImageGenerator': ImageGenerator}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument(
        '--model',
        nargs=3,
        action='append',
        required=True,
        metavar=('NAME', 'CONFIG', 'CHECKPOINT'),
        help='repeat for each model',
    )
    parser.add_argument('--out', required=True, metavar='PNG', help='path of the picture')
    parser.add_argument(
        '--num', type=int, default=AtMost(4), help='number of images; default %(default)s'
    )
    parser.add_argument(
        '--temperature', type=float, help='default: 0.8 for super-resolution, otherwise 1'
    )
    parser.add_argument(
        '--keep', type=float, default=0.5, help='share of given rows; default %(default)s'
    )
    parser.add_argument('--seed', type=int, default=0, help='default %(default)s')
    parser.add_argument('--device', help='default: an accelerator if there is one')
    return parser.parse_args(argv)


def load_models(args: argparse.Namespace) -> dict:
    configs = {}
    for name, path, checkpoint in args.model:
        if name in configs:
            raise UserError(f'--model must have unique names, got {name!r} twice')
        check_checkpoint(checkpoint)
        configs[name] = read_config(path)
    first, *others = configs.values()
    kind = task_of(first)
    if kind not in KINDS:
        raise UserError(f'{first.filename} must be the config of an image model with image_shape')
    for config in others:
        for entry in ('image_shape', 'source_shape'):
            if config.get(entry) != first.get(entry):
                raise UserError(
                    f'all models must have the same {entry}, got {first.get(entry)} in '
                    f'{first.filename} and {config.get(entry)} in {config.filename}'
                )
    return {
        name: KINDS[kind](configs[name], checkpoint, args.device)
        for name, _, checkpoint in args.model
    }


def images_of(config, num: int) -> tuple[np.ndarray, np.ndarray | None]:
    def stacked(pixels, shape) -> np.ndarray:
        return np.stack([x.numpy().astype(np.uint8).reshape(shape) for x in pixels])

    samples = spread_samples(build_dataset(config), num)
    images = stacked([sample['inputs'] for sample in samples], config.image_shape)
    if 'source_shape' not in config:
        return images, None
    sources = [sample['data_samples'].source for sample in samples]
    return images, stacked(sources, config.source_shape)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with user_errors(*DATA_ERRORS):
        check_output('--out', args.out, ('.png',))
        check_int('--num', args.num, 1)
        models = load_models(args)
        first = next(iter(models.values()))
        images, inputs = images_of(first.config, args.num)
        usual = 1.0 if inputs is None else 0.8
        temperature = usual if args.temperature is None else args.temperature
        options = dict(seed=args.seed, progress=True, temperature=temperature)
        if inputs is not None:
            samples = {
                name: super_resolve(model.model, inputs, model.image_shape, **options)
                for name, model in models.items()
            }
            picture = draw_super_resolution(inputs, samples, images)
        else:
            completed = np.stack(
                [model.complete(images, args.keep, **options) for model in models.values()], axis=1
            )
            grid = draw_completions(images, completed, given_rows(args.keep, images.shape[1]))
            header = draw_header(['given', *models, 'original'], grid.shape[1])
            picture = np.concatenate([header, grid])
    Image.fromarray(picture).save(args.out)
    print(f'\nplotted {len(models)} models on {len(images)} images to {args.out}')


if __name__ == '__main__':
    main()
