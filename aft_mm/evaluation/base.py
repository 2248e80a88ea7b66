from collections.abc import Sequence
from typing import Any

from mmengine.evaluator import BaseMetric
from torch import Tensor

from aft_mm.openmmlab import warn


class Metric(BaseMetric):
    """Base class of the metrics.

    Args:
        collect_device: ``'gpu'`` gathers through the process group, on any device; ``'cpu'`` through
            files in a folder that all ranks share.
    """

    default_prefix = ''  # without one mmengine warns in every run

    def __init__(self, collect_device: str = 'gpu', **kwargs: Any) -> None:
        super().__init__(collect_device=collect_device, **kwargs)


class GenerationMetric(Metric):
    """Base class of metrics of generated sequences."""

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        for tokens, sample in zip(data_batch['inputs'], data_samples, strict=True):
            is_measured = sample.get('generated') is not None
            self.results.append(self._measure(tokens, sample) if is_measured else None)

    def _measure(self, tokens: Tensor, sample: dict) -> Any:
        raise NotImplementedError

    def _measured(self, results: list) -> list:
        measured = [result for result in results if result is not None]
        if not measured:
            warn(
                f'{type(self).__name__} is left out, because none of {len(results)} samples has '
                'generated ones; a GenerationTestLoop with num_inputs above 0 as test_cfg '
                'generates them'
            )
        return measured
