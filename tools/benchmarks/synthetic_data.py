"""Data of the size and layout of the real sets, for training runs whose speed is asked for.

    python tools/benchmarks/synthetic_data.py OUT_DIR

- imagenet/train: 1,000 folders of JPEGs of 500 x 375 px, about as large as those of ImageNet, so
  that decoding and augmentation cost what they do there. A class is a mean colour and noise.
- enwik8/enwik8: the sources and pages of this project, one after the other, as often as it takes.

`AFT_MM_DATA=OUT_DIR` points the configs at them. What a model learns of them means nothing.
"""

import argparse
from pathlib import Path

from arguments import positive_int


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('folder', type=Path, metavar='OUT_DIR')
    parser.add_argument(
        '--images-per-class', type=positive_int, default=3, help='default: %(default)s'
    )
    return parser.parse_args(arguments)


if __name__ == '__main__':
    parse_args()  # --help and a wrong argument end before the slow imports

import numpy as np
from PIL import Image
from record import ROOT

CLASSES = 1000
SIZE = (500, 375)
# Noise of this coarser grid, enlarged, has edges and faces as photographs have them.
COARSE = (50, 38)
GRAIN = 12
QUALITY = 90
TEXT_BYTES = 10_000_000


def picture(label: int, generator: np.random.Generator) -> Image.Image:
    """A picture of a class."""
    colour = np.random.default_rng(label).uniform(64, 192, 3)
    coarse = colour + generator.normal(0, 40, (*COARSE[::-1], 3))
    image = Image.fromarray(coarse.clip(0, 255).astype(np.uint8)).resize(SIZE, Image.BICUBIC)
    fine = np.asarray(image) + generator.normal(0, GRAIN, (*SIZE[::-1], 3))
    return Image.fromarray(fine.clip(0, 255).astype(np.uint8))


def write_images(folder: Path, per_class: int) -> None:
    """Folders of JPEGs, one per class."""
    generator = np.random.default_rng(0)
    for label in range(CLASSES):
        place = folder / f'class_{label:04}'
        place.mkdir(parents=True, exist_ok=True)
        for index in range(per_class):
            picture(label, generator).save(place / f'{index}.jpg', quality=QUALITY)


def write_text(path: Path, length: int) -> None:
    """A file of so many bytes of text."""
    files = sorted(file for kind in ('*.py', '*.md') for file in (ROOT / 'aft_mm').rglob(kind))
    text = b''.join(file.read_bytes() for file in files)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((text * (length // len(text) + 1))[:length])


def main(arguments: list[str] | None = None) -> None:
    """Write both sets."""
    args = parse_args(arguments)
    write_text(args.folder / 'enwik8' / 'enwik8', TEXT_BYTES)
    write_images(args.folder / 'imagenet' / 'train', args.images_per_class)
    print(f'{CLASSES * args.images_per_class} images and {TEXT_BYTES} bytes of text')


if __name__ == '__main__':
    main()
