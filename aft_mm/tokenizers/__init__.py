from .points import bounding_cube, check_num_bits, check_order, decode_points, encode_points
from .text import Subwords, TextUnits, read_lexicon, split_lines

__all__ = [
    'Subwords',
    'TextUnits',
    'bounding_cube',
    'check_num_bits',
    'check_order',
    'decode_points',
    'encode_points',
    'read_lexicon',
    'split_lines',
]
