import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aft_mm.checks import check_choice
from aft_mm.registry import METRICS

from .base import Metric


@METRICS.register_module()
class Likelihood(Metric):
    """Mean negative log-likelihood and perplexity over all predictions of the dataset.

    ``bits_per_{per} = Σ nats / (Σ predictions · ln 2)``,
    ``perplexity_per_{per} = exp(Σ nats / Σ predictions)``.

    Args:
        per: Name of one prediction: ``'dim'`` (a sub-pixel), ``'char'``, ``'token'`` or ``'subword'``.
    """

    def __init__(self, per: str = 'dim', **kwargs: Any) -> None:
        check_choice('per', per, ('dim', 'char', 'token', 'subword'))
        self.per = per
        super().__init__(**kwargs)

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        # Per sample, as mmengine drops repeated samples by index.
        self.results += [
            (float(sample['nats']), int(sample['num_dims'])) for sample in data_samples
        ]

    def compute_metrics(self, results: list) -> dict:
        nats, predictions = (math.fsum(column) for column in zip(*results, strict=True))
        if not predictions:
            raise ValueError(
                'Likelihood needs at least one prediction, but every token of the '
                f'{len(results)} samples is given context'
            )
        mean = np.float64(nats / predictions)
        with np.errstate(over='ignore'):  # may be infinite for an untrained model
            perplexity = float(np.exp(mean))
        return {
            f'bits_per_{self.per}': float(mean / math.log(2)),
            f'perplexity_per_{self.per}': perplexity,
        }


@METRICS.register_module()
class TokenAccuracy(Metric):
    """Percentage of tokens that the model ranks first, given the true previous tokens.

    Also the percentage of sequences in which all tokens are ranked first.

    Raises:
        ValueError: If the model's head is not categorical, or there is no prediction.
    """

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        for sample in data_samples:
            if 'num_correct' not in sample:
                raise ValueError(
                    'TokenAccuracy needs samples with num_correct, which a model with a '
                    'CategoricalHead gives, got one without'
                )
            self.results.append((int(sample['num_correct']), int(sample['num_dims'])))

    def compute_metrics(self, results: list) -> dict:
        correct, tokens = (sum(column) for column in zip(*results, strict=True))
        if not tokens:
            raise ValueError(
                'TokenAccuracy needs at least one prediction, but every token of the '
                f'{len(results)} samples is given context'
            )
        predicted = [(hit, number) for hit, number in results if number]
        whole = sum(hit == number for hit, number in predicted)
        return dict(
            percent_correct_tokens=100 * correct / tokens,
            percent_correct_sequences=100 * whole / len(predicted),
        )
