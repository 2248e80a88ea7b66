"""Classify images by the OUT.onnx of `aft_mm export`, as `aft_mm predict` does.

It needs numpy, Pillow and onnxruntime only. The file says how its input is made.
"""

import argparse
import json

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def prepare(path, resize, mean, std, channels):
    """Return the input [1, C, H, W] of the graph for an image file."""
    image = ImageOps.exif_transpose(Image.open(path)).convert('L' if channels == 'grey' else 'RGB')
    for step in resize:
        how = [step.get(key) for key in ('type', 'backend', 'edge', 'keep_ratio', 'interpolation')]
        if how[0] == 'CenterCrop':
            cut = [round((a - b) / 2) for a, b in zip(image.size, step['crop_size'], strict=True)]
            image = image.crop((*cut, *map(sum, zip(cut, step['crop_size'], strict=True))))
        elif how[:3] == ['ResizeEdge', 'pillow', 'short']:
            size = [int(step['scale'] * side / min(image.size)) for side in image.size]
            image = image.resize(size, Image.Resampling[step['interpolation'].upper()])
        elif how[2:] == [None, False, 'area'] and max(step['scale']) <= min(image.size):
            image = image.resize(step['scale'], Image.Resampling.BOX)  # OpenCV's mean of an area
        else:
            raise SystemExit(f'use aft_mm predict; Pillow alone cannot do {step}')
    pixels = np.asarray(image, np.float32).reshape(*image.size[::-1], -1)
    pixels = (pixels[..., :: -1 if channels == 'BGR' else 1] - mean) / std
    return pixels.transpose(2, 0, 1)[None].astype(np.float32)


def classify(graph, paths):
    """Yield the name of the class of each image file."""
    session = onnxruntime.InferenceSession(graph)
    texts = session.get_modelmeta().custom_metadata_map
    classes, *how = (json.loads(texts[key]) for key in ('classes', 'resize', 'mean', 'std'))
    for path in paths:
        inputs = {'image': prepare(path, *how, texts['channels'])}
        yield classes[session.run(['scores'], inputs)[0].argmax()]


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('graph', help='OUT.onnx')
    parser.add_argument('images', nargs='+')
    args = parser.parse_args()
    for path, name in zip(args.images, classify(args.graph, args.images), strict=True):
        print(f'{name}\t{path}')
