"""Likelihood of a sequence model."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from mmengine.evaluator import BaseMetric

from aft_mm.checks import check_choice
from aft_mm.registry import METRICS


@METRICS.register_module()
class Likelihood(BaseMetric):
    """Mean negative log-likelihood and perplexity over all predictions of the data set.

    ``bits_per_{per} = Σ nats / (Σ predictions · ln 2)`` and
    ``perplexity_per_{per} = exp(Σ nats / Σ predictions)``, the sums over all samples of all ranks.
    Long and short samples weigh what they hold, and a sample that two ranks saw counts once.

    Args:
        per: What one prediction is called in the names: ``'dim'`` (a sub-pixel), ``'char'``,
            ``'token'`` or ``'subword'``.
        collect_device: ``'gpu'`` gathers through the process group, whatever its device;
            ``'cpu'`` through files in a folder that all ranks share.
        **kwargs: Those of :class:`mmengine.evaluator.BaseMetric`, such as ``prefix``.

    Raises:
        ValueError: ``per`` is unknown, or the data set holds nothing to predict.
    """

    default_prefix = ''  # without one mmengine warns in every run

    def __init__(self, per: str = 'dim', collect_device: str = 'gpu', **kwargs) -> None:
        check_choice('per', per, ('dim', 'char', 'token', 'subword'))
        self.per = per
        super().__init__(collect_device=collect_device, **kwargs)

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Keep ``nats`` and ``num_dims`` of every sample.

        One result per sample, no sum over the batch: mmengine drops the samples that were repeated
        to give every rank equally many, and finds them by their number.
        """
        self.results += [
            (float(sample['nats']), int(sample['num_dims'])) for sample in data_samples
        ]

    def compute_metrics(self, results: list) -> dict:
        """``{'bits_per_dim': ..., 'perplexity_per_dim': ...}`` of all samples."""
        nats, predictions = (math.fsum(column) for column in zip(*results, strict=True))
        if not predictions:
            raise ValueError(
                'Likelihood needs at least one prediction, but every token of the '
                f'{len(results)} samples is given context'
            )
        mean = np.float64(nats / predictions)
        with np.errstate(over='ignore'):  # an untrained model's may be infinite
            perplexity = float(np.exp(mean))
        return {
            f'bits_per_{self.per}': float(mean / math.log(2)),
            f'perplexity_per_{self.per}': perplexity,
        }
