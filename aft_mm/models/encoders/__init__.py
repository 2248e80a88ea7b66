"""Encoders."""

from .bi_lstm_encoder import BiLSTMEncoder
from .sequence_encoder import SequenceEncoder

__all__ = ['BiLSTMEncoder', 'SequenceEncoder']
