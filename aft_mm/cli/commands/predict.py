"""Predict classes, boxes or masks of images with a trained model."""

import argparse
import csv
import glob
import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from aft_mm.apis import ImagePredictor, Prediction
from aft_mm.checks import check_int, check_number
from aft_mm.cli.arguments import refuse_given
from aft_mm.config.reading import read_config
from aft_mm.errors import CONFIG_ERRORS, UserError, user_errors
from aft_mm.export.prediction import is_exported, load_exported
from aft_mm.images import check_image, check_name, list_images
from aft_mm.progress import progress

COLUMNS = ('path', 'label', 'class_name', 'score', 'share', 'x1', 'y1', 'x2', 'y2')


def find_images(inputs: Sequence[str]) -> list[str]:
    """Return and check the image files of files, folders and patterns, each once."""
    paths: list[str] = []
    for given in inputs:
        if os.path.isdir(given):
            images = [os.path.join(given, name) for name in list_images(Path(given))]
        elif os.path.exists(given):
            images = [given]
        else:
            images = sorted(filter(os.path.isfile, glob.glob(given, recursive=True)))
        if not images:
            kind = 'hold images' if os.path.isdir(given) else 'be an image, a folder or a pattern'
            raise UserError(f'PATH {given!r} must {kind}, got no file')
        paths += images
    paths = list(dict.fromkeys(paths))
    for path in paths:
        check_name(path)
    with ThreadPoolExecutor(16) as pool:
        checks = pool.map(partial(check_image, name='data'), paths)
        list(progress(checks, 'reading images', len(paths)))
    return paths


def rows(prediction: Prediction) -> list[dict]:
    return [
        {
            'path': prediction.path,
            **{key: value for key, value in one.items() if key != 'box'},
            **dict(zip(COLUMNS[-4:], one.get('box', ()), strict=False)),
        }
        for one in prediction.found
    ]


def run(args: argparse.Namespace) -> None:
    with user_errors(*CONFIG_ERRORS, RuntimeError):
        check_int('--batch-size', args.batch_size, 1)
        score = 0.3 if args.score is None else args.score
        check_number('--score', score, 0, 1)
        out = Path(args.out)
        if (out / 'predictions.json').exists():
            raise UserError(f'--out {args.out!r} holds predictions already; name another folder')
        paths = find_images(args.inputs)
        config = read_config(args.config, args.cfg_options)
        if config.get('default_scope') != 'mmdet':
            reason = f'has no effect on the model of {args.config}, without boxes'
            refuse_given(args, ['score'], reason)
        checkpoint = args.checkpoint
        if is_exported(checkpoint):
            refuse_given(args, ['device'], f'has no effect on {checkpoint}, which runs on the CPU')
            checkpoint = load_exported(config, checkpoint)
        predictor = ImagePredictor(config, checkpoint, args.device, score)
        out.mkdir(parents=True, exist_ok=True)
        written: list[dict[str, Any]] = []
        digits = len(str(len(paths)))
        with open(out / 'predictions.csv', 'w', newline='', encoding='utf-8') as file:
            table = csv.DictWriter(file, COLUMNS)
            table.writeheader()
            starts = range(0, len(paths), args.batch_size)
            results = (predictor(paths[first : first + args.batch_size]) for first in starts)
            for predictions in progress(results, 'predicting', len(starts)):
                for prediction in predictions:
                    table.writerows(rows(prediction))
                    name = re.sub(r'[^\w.-]+', '_', Path(prediction.path).stem)[:80]
                    name = f'{len(written):0{digits}}_{name}.png'
                    written.append(dict(path=prediction.path, found=prediction.found))
                    images = {} if args.no_pictures else {'pictures': prediction.picture}
                    if prediction.mask is not None:
                        images['masks'] = prediction.mask
                    for folder, pixels in images.items():
                        (out / folder).mkdir(exist_ok=True)
                        Image.fromarray(pixels).save(out / folder / name)
                        written[-1][folder.removesuffix('s')] = f'{folder}/{name}'
        (out / 'predictions.json').write_text(
            json.dumps(written, indent=1, ensure_ascii=False), encoding='utf-8'
        )
    boxes = sum('box' in one for image in written for one in image['found'])
    if predictor.scope == 'mmdet':
        print(f'{boxes:,} boxes with a score of at least {score:g} (--score)')
    pictures = '' if args.no_pictures else ' and pictures/'
    number = '1 image' if len(paths) == 1 else f'{len(paths):,} images'
    print(f'{number}: {out}/predictions.csv, predictions.json{pictures}')
