"""Encoders."""

from .sequence_encoder import SequenceEncoder

__all__ = ['SequenceEncoder']
