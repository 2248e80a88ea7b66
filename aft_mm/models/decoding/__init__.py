from .ctc import Lexicon
from .generation import (
    Hypothesis,
    beam_search,
    check_logits,
    check_sampling,
    default_length,
    evaluating,
    generate,
    sample_categorical,
)

__all__ = [
    'Hypothesis',
    'Lexicon',
    'beam_search',
    'check_logits',
    'check_sampling',
    'default_length',
    'evaluating',
    'generate',
    'sample_categorical',
]
