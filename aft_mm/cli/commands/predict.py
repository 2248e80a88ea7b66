import argparse
import csv
import glob
import json
import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

from PIL import Image

from aft_mm.apis import ImagePredictor, Prediction
from aft_mm.apis.images import NO_LABEL
from aft_mm.checks import check_int, check_number, counted
from aft_mm.cli.arguments import refuse_given
from aft_mm.config.reading import read_config
from aft_mm.errors import CONFIG_ERRORS, UnusableFile, UserError, user_errors
from aft_mm.export.prediction import is_exported, load_exported
from aft_mm.images import check_image, check_name, find_images, not_read, unread_reason
from aft_mm.progress import progress
from aft_mm.structures import BEST_SCORE

FOLDERS = 'pictures', 'masks'
MOST_NAMED = 5  # images without result in the message
CORNERS = 'x1', 'y1', 'x2', 'y2'
# By the scope of the model.
COLUMNS = {'mmdet': ('score', *CORNERS), 'mmseg': ('share',)}


def image_files(inputs: Sequence[str]) -> tuple[list[str], dict[str, str], str]:
    """Return the readable images of files, folders and patterns, each once, and why others are not.

    Raises:
        UserError: An input has no image, or none can be read.
    """
    paths: list[str] = []
    others: dict[str, str] = {}
    folders: dict[str, str] = {}
    for given in inputs:
        if os.path.isdir(given):
            names, unread = find_images(Path(given), folders)
            images = [os.path.join(given, name) for name in names]
            others |= {os.path.join(given, name): kind for name, kind in unread.items()}
        elif os.path.exists(given):
            images = [given]
        else:
            images = sorted(filter(os.path.isfile, glob.glob(given, recursive=True)))
        if not images:
            kind = 'hold images' if os.path.isdir(given) else 'be an image, a folder or a pattern'
            found = not_read(others) or '; '.join(folders.values()) or 'no file'
            raise UserError(f'PATH {given!r} must {kind}, got {found}')
        paths += images
    paths = list(dict.fromkeys(paths))
    for path in paths:
        check_name(path)
    with ThreadPoolExecutor(16) as pool:
        problems = list(progress(pool.map(problem, paths), 'reading images', len(paths)))
    bad = {path: text for path, text in zip(paths, problems, strict=True) if text}
    if len(bad) == len(paths):
        raise UserError(next(iter(bad.values())))
    read = [path for path in paths if path not in bad]
    reasons = {path: unread_reason(path, kind) for path, kind in others.items()}
    bad |= {path: reason for path, reason in reasons.items() if reason}
    notes = [not_read({path: kind for path, kind in others.items() if not reasons[path]})]
    if folders:
        notes.append(f'{counted(len(folders), "folder")} not read, first {min(folders.values())}')
    return read, bad, '\n'.join(filter(None, notes))


def problem(path: str) -> str:
    try:
        check_image(path, name='')
    except UnusableFile as error:
        return str(error)
    return ''


def predictions(
    predictor: ImagePredictor, paths: Sequence[str], bad: dict[str, str]
) -> list[Prediction]:
    try:
        return predictor(paths)
    except Exception as error:  # of any step of the pipeline, the model or the picture
        if len(paths) > 1:
            return [one for path in paths for one in predictions(predictor, [path], bad)]
        reason = ' '.join(str(error).split())
        kind = '' if isinstance(error, UserError) else f'{type(error).__name__}: '
        bad[paths[0]] = f'image {paths[0]!r}: {kind}{reason}'
        return []


def rows(prediction: Prediction, scope: str) -> list[dict]:
    # Of classes only the best or the accepted ones; predictions.json has others, with all digits.
    found = prediction.found
    if any('accepted' in one for one in found):
        found = [one for one in found if one['accepted']] or [dict(class_name=NO_LABEL)]
    elif scope not in COLUMNS:
        found = found[:1]
    lines = [one | dict(zip(CORNERS, one.get('box', ()), strict=False)) for one in found]
    return [
        {'path': prediction.path}
        | {key: number(value) for key, value in line.items() if key not in ('box', 'accepted')}
        for line in lines
    ]


def number(value: Any) -> Any:
    return f'{value:.6g}' if isinstance(value, float) else value


def write_results(
    predicted: Iterable[Prediction], out: Path, scope: str, digits: int, with_pictures: bool
) -> list[dict[str, Any]]:
    """Write predictions.csv, pictures and masks as results come; return the entries of the JSON."""
    written: list[dict[str, Any]] = []
    with open(out / 'predictions.csv', 'w', newline='', encoding='utf-8') as file:
        columns = COLUMNS.get(scope, ('score',))
        table = csv.DictWriter(file, ('path', 'class_name', 'label', *columns))
        table.writeheader()
        for prediction in predicted:
            table.writerows(rows(prediction, scope))
            name = re.sub(r'[^\w.-]+', '_', Path(prediction.path).stem)[:80]
            name = f'{len(written):0{digits}}_{name}.png'
            written.append(dict(path=prediction.path, found=prediction.found))
            images = dict(zip(FOLDERS, (prediction.picture, prediction.mask), strict=True))
            for folder, pixels in images.items():
                if pixels is not None and (with_pictures or folder != 'pictures'):
                    (out / folder).mkdir(exist_ok=True)
                    Image.fromarray(pixels).save(out / folder / name)
                    written[-1][folder.removesuffix('s')] = f'{folder}/{name}'
    return written


def labels_line(written: Sequence[dict[str, Any]], rule: dict[str, Any]) -> str:
    counts = [sum(one['accepted'] for one in image['found']) for image in written]
    ((name, value),) = rule.items()
    how = {
        'thr': f' with a score of at least {value:.4g}',
        'topk': f', the best {value} of each image',
    }
    return (
        f'{counted(sum(counts), "label")}{how[name]} (model.head.{name}), '
        f'{counts.count(0):,} of {counted(len(counts), "image")} without a label'
    )


def run(args: argparse.Namespace) -> None:
    with user_errors(*CONFIG_ERRORS, RuntimeError):
        check_int('--batch-size', args.batch_size, 1)
        if args.score is not None:
            check_number('--score', args.score, 0, 1)
        out = Path(args.out)
        if out.exists() and not out.is_dir():
            raise UserError(f'--out must be a folder, got the file {args.out!r}')
        if (out / 'predictions.json').exists():
            raise UserError(f'--out {args.out!r} holds predictions already; name another folder')
        paths, bad, passed_over = image_files(args.inputs)
        total = len(paths) + len(bad)
        config = read_config(args.config, args.cfg_options)
        if config.get('default_scope') != 'mmdet':
            reason = f'has no effect on the model of {args.config}, without boxes'
            refuse_given(args, ['score'], reason)
        written_to = FOLDERS[args.no_pictures : 1 + (config.get('default_scope') == 'mmseg')]
        for folder in written_to:
            path = out / folder
            if path.is_file() or path.is_dir() and any(path.iterdir()):
                raise UserError(
                    f'--out {args.out!r} must have no files in {folder}/; name another folder'
                )
        checkpoint = args.checkpoint
        if is_exported(checkpoint):
            refuse_given(args, ['device'], f'has no effect on {checkpoint}, which runs on the CPU')
            checkpoint = load_exported(config, checkpoint)
        predictor = ImagePredictor(config, checkpoint, args.device, args.score)
        starts = range(0, len(paths), args.batch_size)
        batches = (paths[first : first + args.batch_size] for first in starts)
        results = (predictions(predictor, batch, bad) for batch in batches)
        predicted = chain.from_iterable(progress(results, 'predicting', len(starts)))
        out.mkdir(parents=True, exist_ok=True)
        digits = len(str(len(paths)))
        written = write_results(predicted, out, predictor.scope, digits, not args.no_pictures)
        without = [dict(path=path, found=[], error=reason) for path, reason in bad.items()]
        (out / 'predictions.json').write_text(
            json.dumps(written + without, indent=1, ensure_ascii=False), encoding='utf-8'
        )
    boxes = sum('box' in one for image in written for one in image['found'])
    if predictor.scope == 'mmdet':
        stored = args.score is None and BEST_SCORE in predictor.model.dataset_meta
        origin = 'of the best F1 in the validation' if stored else '--score'
        print(f'{counted(boxes, "box")} with a score of at least {predictor.score:.4g} ({origin})')
    elif hasattr(predictor, 'classifier') and predictor.classifier.label_rule:
        print(labels_line(written, predictor.classifier.label_rule))
    names = [f'{out}/predictions.csv', 'predictions.json']
    names += [f'{folder}/' for folder in FOLDERS if (out / folder).is_dir()]
    print(f'{counted(len(written), "image")}: {", ".join(names[:-1])} and {names[-1]}')
    if passed_over:
        print(passed_over)
    if bad:
        raise SystemExit(
            f'Error: {len(bad):,} of {counted(total, "image")} have no result: '
            f'{"; ".join(list(bad.values())[:MOST_NAMED])}'
            + f' and {len(bad) - MOST_NAMED:,} more, see predictions.json'
            * (len(bad) > MOST_NAMED)
        )
