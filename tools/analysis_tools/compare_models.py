"""Draw what several models make of the same images: enlarged faces or completions side by side.

All of them are super-resolution models (figures 6 and 7 of the ICLR submission), or all of them
models of images, which complete the lower half. The images are those of the first config's test
split, evenly spread.

    python tools/analysis_tools/compare_models.py --num 8 --out faces.png \
        --model local2d CONFIG CHECKPOINT --model transformer CONFIG CHECKPOINT
"""

import argparse
from collections.abc import Sequence

from aft_mm.cli.arguments import check_output
from aft_mm.errors import UserError, user_errors


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        '--model',
        nargs=3,
        action='append',
        required=True,
        metavar=('NAME', 'CONFIG', 'CHECKPOINT'),
        help='once per model',
    )
    parser.add_argument('--out', required=True, metavar='PNG', help='where the picture goes')
    parser.add_argument('--num', type=int, default=4, help='images; %(default)s')
    parser.add_argument('--temperature', type=float, help='0.8 for super-resolution, else 1')
    parser.add_argument('--keep', type=float, default=0.5, help='share of the rows that is given')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--device', help='by default an accelerator if there is one')
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()  # --help and a wrong argument end before the slow imports

import numpy as np
from PIL import Image

from aft_mm.apis import ImageGenerator, SuperResolver, build_dataset, spread_samples, task_of
from aft_mm.checks import check_int
from aft_mm.config.reading import check_checkpoint, read_config
from aft_mm.errors import DATA_ERRORS
from aft_mm.sampling.images import given_rows
from aft_mm.sampling.super_resolution import super_resolve
from aft_mm.visualization import draw_completions, draw_header, draw_super_resolution

KINDS = {'SuperResolver': SuperResolver, 'ImageGenerator': ImageGenerator}


def load_models(args: argparse.Namespace) -> dict:
    """Name to what draws from it, all of one kind and shape.

    Raises:
        UserError: they differ, a name comes twice, or a model draws no images.
    """
    configs = {}
    for name, path, checkpoint in args.model:
        if name in configs:
            raise UserError(f'--model needs a name of its own for each, got {name!r} twice')
        check_checkpoint(checkpoint)
        configs[name] = read_config(path)
    # A text model, of which task_of knows nothing else, has no shape of images either.
    first, *others = configs.values()
    kind = task_of(first)
    if kind not in KINDS:
        raise UserError(f'{first.filename} has no image_shape: its model draws no images')
    for config in others:
        for entry in ('image_shape', 'source_shape'):
            if config.get(entry) != first.get(entry):
                raise UserError(
                    f'models that are compared must have the same {entry}, but '
                    f'{first.filename} has {first.get(entry)} and {config.filename} '
                    f'{config.get(entry)}'
                )
    return {
        name: KINDS[kind](configs[name], checkpoint, args.device)
        for name, _, checkpoint in args.model
    }


def images_of(config, num: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Test images uint8 [N, H, W, C], and their inputs [N, h, w, C] if there are such."""
    samples = spread_samples(build_dataset(config), num)
    images = np.stack(
        [
            sample['inputs'].numpy().astype(np.uint8).reshape(config.image_shape)
            for sample in samples
        ]
    )
    if 'source_shape' not in config:
        return images, None
    return images, np.stack(
        [
            sample['data_samples'].source.numpy().astype(np.uint8).reshape(config.source_shape)
            for sample in samples
        ]
    )


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with user_errors(*DATA_ERRORS):
        check_output('--out', args.out, ('.png',))
        check_int('--num', args.num, 1)
        models = load_models(args)
        first = next(iter(models.values()))
        images, inputs = images_of(first.config, args.num)
        options = dict(seed=args.seed, progress=True)
        if inputs is not None:
            options['temperature'] = 0.8 if args.temperature is None else args.temperature
            picture = draw_super_resolution(
                inputs,
                {
                    name: super_resolve(model.model, inputs, model.image_shape, **options)
                    for name, model in models.items()
                },
                images,
            )
        else:
            options['temperature'] = 1.0 if args.temperature is None else args.temperature
            drawn = np.stack(
                [model.complete(images, args.keep, **options) for model in models.values()], axis=1
            )
            grid = draw_completions(images, drawn, given_rows(args.keep, images.shape[1]))
            picture = np.concatenate(
                [draw_header(['given', *models, 'original'], grid.shape[1]), grid]
            )
    Image.fromarray(picture).save(args.out)
    print(f'\n{len(models)} models on {len(images)} images written to {args.out}')


if __name__ == '__main__':
    main()
