"""What travels between data set, model and metric."""

from .images import enlarge_bicubic
from .point_tokens import (
    bounding_cube,
    check_num_bits,
    check_order,
    decode_points,
    encode_points,
)
from .sequence_sample import SequenceSample
from .subwords import Subwords, split_lines
from .utterance_sample import UtteranceSample

__all__ = [
    'SequenceSample',
    'Subwords',
    'UtteranceSample',
    'bounding_cube',
    'check_num_bits',
    'check_order',
    'decode_points',
    'encode_points',
    'enlarge_bicubic',
    'split_lines',
]
