import argparse
from pathlib import Path

import numpy as np
from mmengine.config import Config
from mmengine.registry import DATASETS, init_default_scope
from PIL import Image

from aft_mm.apis import ImageGenerator, PointCloudGenerator, TextGenerator, write_ply
from aft_mm.apis.loading import COMMANDS, check_draws, task_of
from aft_mm.checks import check_int
from aft_mm.cli.arguments import refuse_given, sampling_options
from aft_mm.config.reading import check_data, data_sources, read_config
from aft_mm.engine import derived_seed
from aft_mm.engine.allocator import keep_freed_memory
from aft_mm.errors import DATA_ERRORS, UserError, user_errors
from aft_mm.outputs import check_suffix, check_writable, numbered
from aft_mm.visualization import draw_completions, draw_point_clouds, draw_samples, given_rows

# By kind of model: suffixes of the output file.
SUFFIXES = dict(
    ImageGenerator=('.png',), PointCloudGenerator=('.ply', '.png'), TextGenerator=('.txt',)
)
ARGUMENTS = dict(complete='ImageGenerator', prompt='TextGenerator', num_chars='TextGenerator')


def check_args(args: argparse.Namespace) -> Config:
    config = read_config(args.config, args.cfg_options)
    check_draws(config)
    task = task_of(config)
    if task not in SUFFIXES:
        raise UserError(
            f'{args.config} draws nothing without an input; use `aft_mm {COMMANDS[task][0]}`'
        )
    check_suffix(f'--out for the model of {args.config}', args.out, SUFFIXES[task])
    others = [name for name, owner in ARGUMENTS.items() if owner != task]
    refuse_given(args, others, f'has no effect on the model of {args.config}')
    if args.num is not None:
        check_int('--num', args.num, 1)
    if args.complete is not None:
        given_rows(args.complete, config.image_shape[0])
        check_data(config, 'test')
    return config


def first_images(config: Config, num: int) -> np.ndarray:
    init_default_scope(config.get('default_scope', 'mmengine'))
    dataset = DATASETS.build(config.test_dataloader.dataset)
    num = min(num, len(dataset))
    return np.stack([dataset[i]['inputs'].numpy().reshape(config.image_shape) for i in range(num)])


def files_of(args: argparse.Namespace) -> list[str]:
    return numbered(args.out, (args.num or 1) if Path(args.out).suffix == '.ply' else 1)


def sample_images(args: argparse.Namespace, config: Config) -> None:
    generator = ImageGenerator(config, args.checkpoint, args.device)
    num, options = args.num or 16, sampling_options(args)
    if args.complete is None:
        picture = draw_samples(generator.sample(num, **options))
    else:
        images = first_images(config, num)
        completed = generator.complete(images, args.complete, **options)
        rows = given_rows(args.complete, config.image_shape[0])
        picture = draw_completions(images, completed[:, None], rows)
    Image.fromarray(picture).save(args.out)


def sample_clouds(args: argparse.Namespace, config: Config) -> None:
    generator = PointCloudGenerator(config, args.checkpoint, args.device)
    is_picture = Path(args.out).suffix == '.png'
    clouds = generator.sample(args.num or (8 if is_picture else 1), **sampling_options(args))
    if is_picture:
        Image.fromarray(draw_point_clouds(clouds, config.point_cloud.up)).save(args.out)
        return
    for path, cloud in zip(files_of(args), clouds, strict=True):
        write_ply(path, cloud)


def sample_text(args: argparse.Namespace, config: Config) -> None:
    generator = TextGenerator(config, args.checkpoint, args.device)
    options = sampling_options(args)
    first = options.pop('seed')
    texts = [
        generator(
            args.prompt, args.num_chars, seed=derived_seed(first, i) if i else first, **options
        )
        for i in range(args.num or 1)
    ]
    Path(args.out).write_text(f'\n{"-" * 80}\n'.join(texts), encoding='utf-8')


SAMPLE = dict(
    ImageGenerator=sample_images, PointCloudGenerator=sample_clouds, TextGenerator=sample_text
)


def run(args: argparse.Namespace) -> None:
    with user_errors(*DATA_ERRORS):
        keep_freed_memory()
        config = check_args(args)
        check_writable('--out', files_of(args), data_sources(config))
        SAMPLE[task_of(config)](args, config)
    print('written to ' + ', '.join(files_of(args)))
