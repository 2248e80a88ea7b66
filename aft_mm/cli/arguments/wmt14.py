"""Extract WMT14 English-German from the archives of statmt.org for aft_mm.ParallelText.

    aft_mm convert wmt14 training-parallel-europarl-v7.tgz \\
        training-parallel-commoncrawl.tgz training-parallel-nc-v9.tgz dev.tgz test-full.tgz \\
        --out data/wmt14_en_de

The result is train.en and train.de (about 4.5 million pairs), val.* (newstest2013) and test.*
(newstest2014), raw text with one sentence per line.
"""

import argparse
from pathlib import Path


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('archives', type=Path, nargs='+', metavar='ARCHIVE', help='the .tgz files')
    parser.add_argument(
        '--out',
        type=Path,
        default=Path('data/wmt14_en_de'),
        metavar='FOLDER',
        help='output folder (default: %(default)s)',
    )
