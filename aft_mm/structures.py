"""The data samples that travel between dataset, model and metric, and entries of the MessageHub."""

from collections.abc import Sized
from typing import TypeVar

from aft_mm.openmmlab import BaseDataElement

__all__ = ['SequenceSample', 'UtteranceSample']

# Entries of mmengine's MessageHub that a metric writes, a checkpoint holds and a command reads.
#: ``dict(measure='IoU', values={class: value})`` of the last validation or test.
BY_CLASS = 'by_class'
#: Minimum score of a box with the best F1; a checkpoint has it in its ``dataset_meta``, too.
BEST_SCORE = 'best_f1_score'
#: What a published checkpoint and an exported file keep of a checkpoint's ``dataset_meta``.
DATASET_META = ('classes', 'palette', BEST_SCORE)


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


Sample = TypeVar('Sample', SequenceSample, UtteranceSample)


def samples_of(inputs: Sized, samples: list[Sample] | None, kind: type[Sample]) -> list[Sample]:
    """Return one sample per input, of the given `kind` if there are none."""
    if samples is None:
        return [kind() for _ in range(len(inputs))]
    if len(samples) != len(inputs):
        what = kind.__name__.removesuffix('Sample').lower()
        raise ValueError(
            f'data_samples must be one per {what}, got {len(samples)} for {len(inputs)}'
        )
    return samples
