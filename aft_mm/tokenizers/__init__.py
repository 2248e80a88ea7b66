from .points import bounding_cube, check_num_bits, check_order, decode_points, encode_points
from .subwords import Subwords, split_lines
from .text_units import TextUnits, read_lexicon

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
