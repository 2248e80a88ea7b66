"""Sample 15,000 points on the surface of meshes, in the layout of ShapeNetCore.v2.PC15k.

MESHES has one folder per class, with meshes at any depth below it, such as

    <synset>/<model>/models/model_normalized.obj       ShapeNetCore v2
    <class>/{train,test}/<model>.off                   ModelNet

OUT gets <synset or class>/{train,val,test}/<model>.npy, float32 [15000, 3] in the unit and
orientation of the mesh, for aft_mm.PointClouds. A mesh below a folder train, val or test stays in
that split; others are split by --splits or --ratio.
"""

import argparse
from pathlib import Path


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('meshes', metavar='MESHES', type=Path, help='folder of the class folders')
    parser.add_argument(
        'out',
        metavar='OUT',
        type=Path,
        nargs='?',
        default=Path('data/ShapeNetCore.v2.PC15k'),
        help='output folder (default: data/ShapeNetCore.v2.PC15k)',
    )
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
    parser.add_argument('--jobs', type=int, default=1, help='number of processes (default: 1)')
