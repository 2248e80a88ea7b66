"""Compare a segmentor on a whole large image with the same segmentor on tiles of it.

The image is a mosaic of the config's test images; the reference is each test image alone. The table
has mIoU, accuracy, that of pixels at tile borders, seconds, and MiB.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arguments import add_clock, positive_int
from measuring import added_peak, in_fresh_process, interleaved
from mmengine.config import Config
from mmengine.registry import DATASETS, DefaultScope
from record import write_json
from torch import Tensor

from aft_mm.apis.loading import load_model


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('config', type=Path, help='config of a segmentor of mmseg')
    parser.add_argument('checkpoint', type=Path)
    parser.add_argument('--columns', type=positive_int, default=6, help='default %(default)s')
    parser.add_argument('--tile', type=positive_int, default=512, help='px; default %(default)s')
    parser.add_argument(
        '--overlaps',
        type=int,
        nargs='+',
        default=[0, 128],
        help='px that neighbouring tiles share; default %(default)s',
    )
    parser.add_argument('--seam', type=positive_int, default=16, help='px; default %(default)s')
    parser.add_argument('--rounds', type=positive_int, default=3, help='default %(default)s')
    parser.add_argument('--threads', type=positive_int, default=1, help='default %(default)s')
    add_clock(parser, 'cpu')
    parser.add_argument('--json', type=Path, help='write rows and environment to this file')
    args = parser.parse_args(arguments)
    if not all(0 <= x < args.tile for x in args.overlaps):
        parser.error(f'argument --overlaps: must be in 0 to {args.tile - 1}, got {args.overlaps}')
    return args


def read_frames(config: Config, model: Any) -> tuple[Tensor, Tensor]:
    with DefaultScope.overwrite_default_scope(config.default_scope):
        items = list(DATASETS.build(config.test_dataloader.dataset))
    labels = torch.cat([x['data_samples'].gt_sem_seg.data for x in items])
    data = dict(
        inputs=[x['inputs'] for x in items], data_samples=[x['data_samples'] for x in items]
    )
    return model.data_preprocessor(data)['inputs'], labels.long()


def mosaic(frames: Tensor, columns: int) -> Tensor:
    rows = [torch.cat(list(x), -1) for x in frames.split(columns) if len(x) == columns]
    return torch.cat(rows, -2)[None]


@torch.no_grad()
def segment_whole(model: Any, image: Tensor) -> Tensor:
    meta = [dict(ori_shape=image.shape[2:], img_shape=image.shape[2:])] * len(image)
    return model.encode_decode(image, meta).argmax(1)


@torch.no_grad()
def segment_tiles(model: Any, image: Tensor, size: int, overlap: int) -> Tensor:
    model.test_cfg.update(mode='slide', crop_size=(size, size), stride=(size - overlap,) * 2)
    meta = [dict(ori_shape=image.shape[2:], img_shape=image.shape[2:])]
    return model.slide_inference(image, meta).argmax(1)


def seam_mask(shape: Sequence[int], frame: Sequence[int], size: int, width: int) -> Tensor:
    """Return a bool mask [H, W] of pixels within `width` of a border of tiles, not of frames."""
    masks = []
    for length, period in zip(shape, frame, strict=True):
        near = torch.zeros(length, dtype=torch.bool)
        for start in range(size, length, size):
            if width <= start % period <= period - width:
                near[start - width : start + width] = True
        masks.append(near)
    return masks[0][:, None] | masks[1][None, :]


def score(predicted: Tensor, labels: Tensor, classes: int, seam: Tensor | None = None) -> dict:
    from mmseg.evaluation import IoUMetric

    areas = IoUMetric.intersect_and_union(predicted, labels.clamp_max(classes), classes, classes)
    found = IoUMetric.total_area_to_metrics(*areas, metrics=['mIoU'])
    row = dict(miou=100 * np.nanmean(found['IoU']).item(), accuracy=100 * found['aAcc'].item())
    if seam is not None:
        row['seam_accuracy'] = score(predicted[:, seam], labels[:, seam], classes)['accuracy']
    return row


def peak(args: argparse.Namespace, overlap: int | None) -> float:
    torch.set_num_threads(1)
    config, model = load_model(str(args.config), str(args.checkpoint), 'cpu')
    image = mosaic(read_frames(config, model)[0], args.columns)
    segment_whole(model, image[..., : args.tile, : args.tile])  # loads libraries
    return added_peak(lambda: run(model, image, args.tile, overlap))


def run(model: Any, image: Tensor, size: int, overlap: int | None) -> Tensor:
    if overlap is None:
        return segment_whole(model, image)
    return segment_tiles(model, image, size, overlap)


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    torch.set_num_threads(args.threads)
    args.device = 'cpu'
    config, model = load_model(str(args.config), str(args.checkpoint), 'cpu')
    frames, frame_labels = read_frames(config, model)
    image, labels = mosaic(frames, args.columns), mosaic(frame_labels, args.columns)
    used = len(frames) // args.columns * args.columns
    classes = model.decode_head.num_classes
    seam = seam_mask(labels.shape[1:], frames.shape[2:], args.tile, args.seam)
    size = f'{image.shape[3]} x {image.shape[2]}'
    print(f'{used} images as one of {size} px, tiles of {args.tile} px', flush=True)

    alone = torch.cat([segment_whole(model, x) for x in frames[:used].split(1)])
    alone_row = score(mosaic(alone, args.columns), labels, classes, seam)
    rows = [dict(form='each image alone', **alone_row)]
    forms: dict[str, int | None] = dict(whole=None)
    forms |= {f'tiles, overlap {x} px': x for x in args.overlaps}
    calls: dict[str, Callable[[], Tensor]] = {
        name: lambda x=overlap: run(model, image, args.tile, x) for name, overlap in forms.items()
    }
    results = {name: call() for name, call in calls.items()}
    times = interleaved(calls, args.rounds, clock=args.clock)
    for name, overlap in forms.items():
        row = dict(form=name, **score(results[name], labels, classes, seam))
        row['seconds'] = statistics.median(times[name])
        row['mib'] = in_fresh_process(peak, args, overlap)
        rows.append(row)
    for row in rows:
        shown = ', '.join(f'{k} {v:.2f}' for k, v in row.items() if k != 'form')
        print(f'{row["form"]:<24} {shown}', flush=True)
    write_json(args.json, rows, args, image_size=size, images=used)


if __name__ == '__main__':
    main()
