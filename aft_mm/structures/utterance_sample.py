"""The sample of speech recognition."""

from mmengine.structures import BaseDataElement

__all__ = ['UtteranceSample']


class UtteranceSample(BaseDataElement):
    """What is known about one utterance besides its features, and what was recognised.

    ====================  ========  ===========================================================
    field                 kind      meaning
    ====================  ========  ===========================================================
    ``name``              metainfo  id of the utterance, or the path of its file
    ``text``              metainfo  the transcript as it is written, optional
    ``units``             metainfo  the transcript as ints, tuple; 0 is the blank and not in it
    ``length``            metainfo  frames before padding
    ``remarks``           metainfo  what was done to unusual input, ``{sentence: file}``
    ``skipped``           metainfo  one sentence per unusable file in whose place this one came
    ``recognized``        data      the units that were recognised, list of ints
    ``score``             data      their log probability in nats, of the beam or the best path
    ====================  ========  ===========================================================

    ``UtteranceSample(metainfo=dict(name='a', text='no', units=(15, 16), length=31))``; recognized
    and score are the model's.
    """
