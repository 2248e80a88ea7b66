from .bi_lstm_encoder import BiLSTMEncoder
from .convolutional_encoders import ConformerEncoder, TDNNEncoder
from .sequence_encoder import SequenceEncoder

__all__ = ['BiLSTMEncoder', 'ConformerEncoder', 'SequenceEncoder', 'TDNNEncoder']
