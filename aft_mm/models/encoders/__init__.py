from .frame_encoders import BiLSTMEncoder, ConformerEncoder, TDNNEncoder
from .sequence_encoder import SequenceEncoder

__all__ = ['BiLSTMEncoder', 'ConformerEncoder', 'SequenceEncoder', 'TDNNEncoder']
