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
    ``box``               metainfo  cube of a point cloud, ``(centre (3 floats), side)``
    ``remarks``           metainfo  what was done to unusual input, ``{sentence: file}``
    ``skipped``           metainfo  one sentence per unusable file in whose place this one came
    ``source``            data      tokens [S] or [S, C] that an encoder reads, optional
    ``nats``              data      −log p of the predicted tokens, their sum; float
    ``num_dims``          data      how many dimensions (sub-pixels, characters) these are; int
    ``num_correct``       data      of how many of them the true value was the most likely, where
                                    the head is categorical; int
    ``reference``         metainfo  the text that a translation is held against, optional
    ``translation``       metainfo  the text that the model made of the source in a test
    ``drawn``             data      tokens [N, T] or [N, T, C] that the model drew in a test
    ====================  ========  ===========================================================

    ``SequenceSample(metainfo=dict(length=7, num_context=0), source=tokens)``; nats, num_dims and
    num_correct are the model's, drawn the test loop's.
    """
