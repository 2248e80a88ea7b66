"""How many tokens a sequence model would have predicted."""

from collections.abc import Sequence
from typing import Any

from mmengine.evaluator import BaseMetric

from aft_mm.registry import METRICS


@METRICS.register_module()
class TokenAccuracy(BaseMetric):
    """Percent of the predicted tokens that the model holds for the most likely, each after the true
    ones before it, and percent of the sequences in which all are.

    Args:
        collect_device: ``'gpu'`` gathers through the process group, whatever its device;
            ``'cpu'`` through files in a folder that all ranks share.
        **kwargs: Those of :class:`mmengine.evaluator.BaseMetric`, such as ``prefix``.

    Raises:
        ValueError: The samples do not tell, since the model's head is no categorical one, or the
            data set holds nothing to predict.
    """

    default_prefix = ''  # without one mmengine warns in every run

    def __init__(self, collect_device: str = 'gpu', **kwargs) -> None:
        super().__init__(collect_device=collect_device, **kwargs)

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Keep ``num_correct`` and ``num_dims`` of every sample."""
        for sample in data_samples:
            if 'num_correct' not in sample:
                raise ValueError(
                    'TokenAccuracy needs samples with num_correct, which a model with a '
                    'CategoricalHead gives, but got one without'
                )
            self.results.append((int(sample['num_correct']), int(sample['num_dims'])))

    def compute_metrics(self, results: list) -> dict:
        """``{'percent_correct_tokens': ..., 'percent_correct_sequences': ...}``."""
        correct, tokens = (sum(column) for column in zip(*results, strict=True))
        if not tokens:
            raise ValueError(
                'TokenAccuracy needs at least one prediction, but every token of the '
                f'{len(results)} samples is given context'
            )
        whole = sum(hit == number for hit, number in results)
        return dict(
            percent_correct_tokens=100 * correct / tokens,
            percent_correct_sequences=100 * whole / len(results),
        )
