"""The data samples that travel between data set, model and metric, and a resize of images."""

from .images import enlarge_bicubic
from .sequence_sample import SequenceSample
from .utterance_sample import UtteranceSample

__all__ = ['SequenceSample', 'UtteranceSample', 'enlarge_bicubic']
