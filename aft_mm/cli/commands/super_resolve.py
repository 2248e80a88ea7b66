import argparse

import numpy as np
from mmengine.config import Config
from PIL import Image

from aft_mm.apis import SuperResolver
from aft_mm.apis.loading import check_task
from aft_mm.checks import check_int
from aft_mm.cli.arguments import sampling_options
from aft_mm.config.reading import data_sources, read_config
from aft_mm.engine.allocator import keep_freed_memory
from aft_mm.errors import DATA_ERRORS, UserError, user_errors
from aft_mm.images import read_image
from aft_mm.outputs import check_suffix, check_writable, numbered
from aft_mm.visualization import draw_super_resolution


def check_args(args: argparse.Namespace) -> Config:
    config = read_config(args.config, args.cfg_options)
    check_task(config, 'SuperResolver')
    check_suffix('OUT', args.out, ('.png',))
    check_int('--num', args.num, 1)
    return config


def enlarge(
    args: argparse.Namespace, resolver: SuperResolver, image: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    options = sampling_options(args)
    if args.tile is not None:
        rows, columns = map(len, resolver.tile_starts(image, args.tile))
        print(
            f'{rows * columns} tiles ({rows} x {columns}) to sample, {args.num} times each',
            flush=True,
        )
        return image, resolver.tile(image, args.num, args.tile, **options)
    if args.fit is not False:  # None: without CROP
        image = resolver.fit(image, args.fit)
    return image, resolver(image, args.num, **options)


def run(args: argparse.Namespace) -> None:
    with user_errors(*DATA_ERRORS):
        keep_freed_memory()
        config = check_args(args)
        image, warnings = read_image(args.input, config.source_shape[-1])
        for warning in warnings:
            print(f'{args.input}: {warning}')
        paths = numbered(args.out, 1 if args.picture else args.num)
        check_writable('OUT', paths, [args.input, *data_sources(config)])
        resolver = SuperResolver(config, args.checkpoint, args.device)
        try:
            image, samples = enlarge(args, resolver, image)
        except UserError as error:
            raise UserError(f'{args.input!r}: {error}') from error
        if args.picture:
            samples = draw_super_resolution(image[None], samples[None])[None]
        for path, sample in zip(paths, samples, strict=True):
            is_grey = sample.shape[-1] == 1
            Image.fromarray(sample[..., 0] if is_grey else sample).save(path)
    print('written to ' + ', '.join(paths))
