"""Train a shared subword vocabulary for a pair of languages (byte-pair encoding, sentencepiece).

    aft_mm convert subwords data/multi30k/train.de data/multi30k/train.en \\
        --vocab-size 4000 --out data/multi30k/subwords.model

The text is not normalised: decoding restores it except for repeated spaces.
"""

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
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
