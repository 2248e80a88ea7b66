"""Initialise AFT-conv from a trained DeiT or ViT (section 5.3 "Compatibility" of arXiv 2105.14103).

SRC is a checkpoint of timm, of the official DeiT (a dict with 'model') or of mmpretrain. Patch
embedding, norms, MLPs, value and output projections and the classifier are copied. Queries, keys
and position biases keep the initial values of the model of --config. A config loads the file with
load_from='DST.pth' or, without the head, with

    model = dict(backbone=dict(init_cfg=dict(
        type='Pretrained', checkpoint='DST.pth', prefix='backbone')))
"""

import argparse

CONFIG = 'aft-conv-base-h32-k25_8xb8-100e-from-deit_in1k-384px'


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('src', metavar='SRC.pth', help='checkpoint of DeiT or ViT')
    parser.add_argument('dst', metavar='DST.pth', help='path of the converted checkpoint')
    parser.add_argument(
        '--config', default=CONFIG, help='config of the model (default: that of table 8)'
    )
    parser.add_argument('--query', action='store_true', help='also copy the query projection')
    parser.add_argument(
        '--average-keys',
        action='store_true',
        help='also copy the keys: the key of head i is the mean over its D/h channels',
    )
    parser.add_argument(
        '--no-head',
        dest='head',
        action='store_false',
        help='omit the classifier, for a dataset with other classes',
    )
