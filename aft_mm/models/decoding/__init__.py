"""Decoding: token-by-token generation, beam search, CTC decoding and sampling."""

from .generation import Hypothesis, beam_search, default_length, generate
from .sampling import check_logits, check_sampling, draw

__all__ = [
    'Hypothesis',
    'beam_search',
    'check_logits',
    'check_sampling',
    'default_length',
    'draw',
    'generate',
]
