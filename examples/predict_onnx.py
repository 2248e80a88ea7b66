"""Classify images by the OUT.onnx of `aft_mm export`, as `aft_mm predict` does.

It needs numpy, Pillow and onnxruntime only. The file says how its input is made.
"""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def prepare(path, about, channels):
    """Return the input [1, C, H, W] of the graph for an image file."""
    image = ImageOps.exif_transpose(Image.open(path)).convert('L' if channels == 'grey' else 'RGB')
    for step in about['resize']:
        if step['type'] == 'CenterCrop':
            cut = [round((a - b) / 2) for a, b in zip(image.size, step['crop_size'], strict=True)]
            image = image.crop((*cut, *map(sum, zip(cut, step['crop_size'], strict=True))))
        elif (step['type'], step.get('edge'), step.get('backend')) == (
            'ResizeEdge',
            'short',
            'pillow',
        ):
            size = [int(step['scale'] * side / min(image.size)) for side in image.size]
            image = image.resize(size, Image.Resampling[step['interpolation'].upper()])
        else:
            sys.exit(f'this example has no {step}; use aft_mm predict')
    pixels = np.asarray(image, np.float32).reshape(*image.size[::-1], -1)
    pixels = (pixels[..., :: -1 if channels == 'BGR' else 1] - about['mean']) / about['std']
    return pixels.transpose(2, 0, 1)[None].astype(np.float32)


def main(graph, *paths):
    session = onnxruntime.InferenceSession(graph)
    texts = session.get_modelmeta().custom_metadata_map
    about = {key: json.loads(texts[key]) for key in ('classes', 'resize', 'mean', 'std')}
    for path in paths:
        image = prepare(path, about, texts['channels'])
        (scores,) = session.run(['scores'], {'image': image})[0]
        print(f'{about["classes"][scores.argmax()]}\t{path}')


if __name__ == '__main__':
    main(*sys.argv[1:])
