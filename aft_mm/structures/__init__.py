"""What travels between data set, model and metric."""

from .sequence_sample import SequenceSample

__all__ = ['SequenceSample']
