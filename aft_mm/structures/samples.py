"""The data samples that travel between dataset, model and metric."""

from aft_mm.openmmlab import BaseDataElement


class SequenceSample(BaseDataElement):
    """Facts about one sequence of tokens, and its predictions.

    ====================  ========  ===========================================================
    field                 kind      meaning
    ====================  ========  ===========================================================
    ``length``            metainfo  tokens before padding
    ``num_context``       metainfo  leading tokens that are given, without loss
    ``box``               metainfo  cube of a point cloud, ``(centre (3 floats), side)``
    ``warnings``          metainfo  changes to unusual input, ``{warning: file}``
    ``skipped``           metainfo  messages of the unusable files that this one replaces
    ``predicted``         data      bool [T], tokens with a loss; default: all after the context
    ``source``            data      tokens [S] or [S, C] that an encoder reads, optional
    ``nats``              data      sum of −log p over the predicted tokens, float
    ``num_dims``          data      number of predictions (sub-pixels, characters), int
    ``num_correct``       data      predictions whose most likely value is the true one, int;
                                    of categorical heads only
    ``reference``         metainfo  the reference translation, optional
    ``translation``       metainfo  the translation by the model
    ``generated``         data      tokens [N, T] or [N, T, C] that the model sampled
    ====================  ========  ===========================================================
    """


class UtteranceSample(BaseDataElement):
    """Facts about one utterance, and what was recognised.

    ====================  ========  ===========================================================
    field                 kind      meaning
    ====================  ========  ===========================================================
    ``name``              metainfo  id of the utterance, or the path of its file
    ``text``              metainfo  the transcript as it is written, optional
    ``units``             metainfo  the transcript as ints without blanks (0), tuple
    ``length``            metainfo  frames before padding
    ``warnings``          metainfo  changes to unusual input, ``{warning: file}``
    ``skipped``           metainfo  messages of the unusable files that this one replaces
    ``recognized``        data      the recognised units, list of ints
    ``in_lexicon``        data      those among the words of a lexicon, list of ints
    ``score``             data      their log probability in nats, of the beam or the best path
    ====================  ========  ===========================================================
    """
