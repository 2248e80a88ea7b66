"""Data samples."""

from .samples import SequenceSample, UtteranceSample

__all__ = ['SequenceSample', 'UtteranceSample']
