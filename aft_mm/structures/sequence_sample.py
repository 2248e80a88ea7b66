"""The sample of a sequence task."""

from mmengine.structures import BaseDataElement

__all__ = ['SequenceSample']


class SequenceSample(BaseDataElement):
    """What is known about one sequence of tokens besides the tokens, and what was predicted.

    ====================  ========  ===========================================================
    field                 kind      meaning
    ====================  ========  ===========================================================
    ``length``            metainfo  tokens before padding
    ``num_context``       metainfo  leading tokens that are given: not in loss and likelihood
    ``source``            data      tokens [S] or [S, C] that an encoder reads, optional
    ``nats``              data      −log p of the predicted tokens, their sum; float
    ``num_dims``          data      how many dimensions (sub-pixels, characters) these are; int
    ====================  ========  ===========================================================

    ``SequenceSample(metainfo=dict(length=7, num_context=0), source=tokens)``; the last two are the
    model's.
    """
