"""Classify images by the OUT.onnx of `aft_mm export`, as `aft_mm predict` does.

It needs numpy, Pillow and onnxruntime only. The file says how its input is made.
"""

import argparse
import json
from contextlib import suppress

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def average(image, size):
    """Return the means of an image over the areas of the new pixels, as OpenCV's INTER_AREA."""
    pixels = np.asarray(image, float)
    for axis, new in ((1, size[0]), (0, size[1])):
        old = np.arange(pixels.shape[axis])
        edges = np.linspace(0, len(old), new + 1)[:, None]
        share = np.clip(np.minimum(edges[1:], old + 1) - np.maximum(edges[:-1], old), 0, 1)
        pixels = np.moveaxis(np.tensordot(share, pixels, (1, axis)), 0, axis) * new / len(old)
    return Image.fromarray(np.uint8(np.rint(pixels)))


def read(path):
    """Return an image turned as EXIF says, with the upper 8 of 16 bits, on white."""
    try:
        with open(path, 'rb') as file:  # by its path, Pillow garbles a turned TIFF
            image = Image.open(file)
            image.load()
    except (OSError, SyntaxError) as error:
        raise SystemExit(f'{path} cannot be read: {error}') from None
    if image.mode == 'F' or image.mode == 'I' and image.format == 'TIFF':
        raise SystemExit(f'{path} has values of unknown range; save it with 8 or 16 bits')
    with suppress(Exception):  # of damaged EXIF
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith('I'):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        white = Image.new('RGBA', image.size, 'white')
        image = Image.alpha_composite(white, image.convert('RGBA'))
    return image


def prepare(path, resize, mean, std, channels):
    """Return the input [1, C, H, W] of the graph for an image file."""
    image = read(path).convert('L' if channels == 'grey' else 'RGB')
    for step in resize:
        how = [step.get(key) for key in ('type', 'backend', 'edge', 'keep_ratio', 'interpolation')]
        if how[0] == 'CenterCrop':
            cut = [round((a - b) / 2) for a, b in zip(image.size, step['crop_size'], strict=True)]
            image = image.crop((*cut, *map(sum, zip(cut, step['crop_size'], strict=True))))
        elif how[:3] == ['ResizeEdge', 'pillow', 'short']:
            size = [int(step['scale'] * side / min(image.size)) for side in image.size]
            image = image.resize(size, Image.Resampling[step['interpolation'].upper()])
        elif how[2:] == [None, False, 'area'] and max(step['scale']) <= min(image.size):
            image = average(image, step['scale'])
        else:
            raise SystemExit(f'use aft_mm predict; Pillow alone cannot do {step}')
    pixels = np.asarray(image, np.float32).reshape(*image.size[::-1], -1)
    pixels = (pixels[..., :: -1 if channels == 'BGR' else 1] - mean) / std
    return pixels.transpose(2, 0, 1)[None].astype(np.float32)


def labels(scores, texts):
    """Return the best class, or the labels that a multi-label model accepts, the best first."""
    order = np.argsort(-scores, kind='stable')
    if 'thr' in texts:
        accepted = np.exp(-np.logaddexp(0, -scores)) >= json.loads(texts['thr'])  # sigmoid
        return order[accepted[order]]
    return order[: json.loads(texts.get('topk', '1'))]


def classify(graph, paths):
    """Yield the name of the class of each image file, or the names of its labels."""
    session = onnxruntime.InferenceSession(graph)
    texts = session.get_modelmeta().custom_metadata_map
    if 'resize' not in texts:
        raise SystemExit(f'{graph} does not say how to resize images: it was exported with --size')
    classes, *how = (json.loads(texts[key]) for key in ('classes', 'resize', 'mean', 'std'))
    for path in paths:
        inputs = {'image': prepare(path, *how, texts['channels'])}
        (scores,) = session.run(['scores'], inputs)[0]
        yield ', '.join(classes[label] for label in labels(scores, texts)) or 'no label'


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('graph', help='OUT.onnx')
    parser.add_argument('images', nargs='+')
    args = parser.parse_args()
    for path, name in zip(args.images, classify(args.graph, args.images), strict=True):
        print(f'{name}\t{path}')
