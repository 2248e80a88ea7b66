from .sequence_decoder import DecoderState, SequenceDecoder

__all__ = ['DecoderState', 'SequenceDecoder']
