"""Data samples, and bicubic enlarging."""

from .images import enlarge_bicubic
from .samples import SequenceSample, UtteranceSample

__all__ = ['SequenceSample', 'UtteranceSample', 'enlarge_bicubic']
