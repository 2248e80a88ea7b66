"""Data of the five kinds of `aft_mm new` whose names, folders and files are code for a config."""

import json
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np

from .helpers import save_picture

#: Code that leaves a folder ``ran``, between quotes.
CODE = "', __import__('os').mkdir('ran'), '"
#: mmengine uses the default of a variable as a regular expression on the text of a config.
EATS_THE_QUOTE = '{{$QQ:(?s:.*)}}'
#: Names of classes, sorted.
NAMES = [
    '"\'+__import__("os").mkdir("ran")+\'"',
    r'\x7b\x7b$QQ:b\x7d\x7d',
    'split = SPLIT',  # a word that `aft_mm new` once replaced in the text
    '{{ _base_.model }}',
    '{{ fileDirname }}',
    EATS_THE_QUOTE,
    "{{'$HOME:x'}}",
    "~'}}', __import__('os').mkdir('ran'), 'b']#",
]
#: Name of a folder, and of the config and work dir that are named after it.
FOLDER = f'{EATS_THE_QUOTE}{CODE}'
NUMBER = 2 * len(NAMES)
RNG = np.random.default_rng(0)


def save(path: Path, shape: tuple[int, ...] = (64, 96, 3), high: int = 256) -> None:
    save_picture(path, RNG.integers(0, high, shape))


def write(kind: str, root: Path) -> None:
    """Write data in which each of NAMES has two images."""
    stems = [f'{number}\u2028{EATS_THE_QUOTE}' for number in range(NUMBER)]
    labels = [number % len(NAMES) for number in range(NUMBER)]
    if kind == 'text':
        root.write_text('All happy families are alike. ' * 300, 'utf-8')
    for stem, label in zip(stems, labels, strict=True):
        if kind == 'image-folder':
            save(root / NAMES[label] / f'{stem}.jpg')
        elif kind == 'masks':
            save(root / f'images/{stem}.jpg')
            save(root / f'masks/{stem}.png', (64, 96), len(NAMES))
        elif kind == 'coco':
            save(root / f'images/{stem}.jpg')
        elif kind == 'voc':
            save(root / f'JPEGImages/{stem}.jpg')
            (root / 'Annotations').mkdir(exist_ok=True)
            (root / f'Annotations/{stem}.xml').write_text(
                '<annotation><size><width>96</width><height>64</height><depth>3</depth></size>'
                f'<object><name>{escape(NAMES[label])}</name><difficult>0</difficult>'
                '<bndbox><xmin>9</xmin><ymin>5</ymin><xmax>50</xmax><ymax>44</ymax></bndbox>'
                '</object></annotation>'
            )
    if kind == 'masks':
        (root / 'classes.txt').write_text('\n'.join(NAMES))
    if kind == 'coco':
        size, box = dict(width=96, height=64), dict(bbox=[8, 4, 41, 39], area=41 * 39, iscrowd=0)
        content = dict(
            images=[dict(size, id=i + 1, file_name=f'{stems[i]}.jpg') for i in range(NUMBER)],
            annotations=[
                dict(box, id=i + 1, image_id=i + 1, category_id=labels[i]) for i in range(NUMBER)
            ],
            categories=[dict(id=i, name=name) for i, name in enumerate(NAMES)],
        )
        (root / 'all.json').write_text(json.dumps(content))
