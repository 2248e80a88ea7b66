"""What a mean hides: results of each class of detectors and segmentors, and the best minimum score."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
from mmengine.evaluator import BaseMetric
from mmengine.logging import MessageHub
from torch import Tensor

from aft_mm.structures import BEST_SCORE, BY_CLASS

LEAST_IOU = 0.5
RECALLS = np.linspace(0, 1, 101)  # of pycocotools


class ByClass(BaseMetric):
    """Base class of metrics that store ``measure`` of each class in the MessageHub."""

    default_prefix = ''  # without one mmengine warns
    measure = ''

    def __init__(self) -> None:
        super().__init__(collect_device='gpu')  # on any device

    def store(self, values: Sequence[float]) -> None:
        """Store a value, or NaN, of each class of the data set."""
        classes = (self.dataset_meta or {})['classes']
        by_name = {str(name): float(value) for name, value in zip(classes, values, strict=True)}
        hub = MessageHub.get_current_instance()
        hub.update_info(BY_CLASS, dict(measure=self.measure, values=by_name))


class BoxesByClass(ByClass):
    """Average precision of each class at IoU 0.5, and the score with the best F1 over all boxes."""

    measure = 'AP50'

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        for sample in data_samples:
            self.results.append(
                matches(
                    sample['pred_instances'],
                    sample['gt_instances'],
                    sample.get('ignored_instances', {}),
                )
            )

    def compute_metrics(self, results: list) -> dict[str, float]:
        """Return ``best_f1`` and its ``best_f1_score``; nothing without a hit."""
        hub = MessageHub.get_current_instance()
        hub.runtime_info.pop(BEST_SCORE, None)  # of the last validation
        scores, labels, hits, objects = map(np.concatenate, zip(*results, strict=True))
        order = np.argsort(-scores, kind='stable')
        scores, labels, hits = scores[order], labels[order], hits[order]
        numbers = range(len((self.dataset_meta or {})['classes']))
        self.store([average_precision(hits[labels == i], (objects == i).sum()) for i in numbers])
        if not hits.any():
            return {}
        f1 = 2 * hits.cumsum() / (np.arange(1, len(hits) + 1) + len(objects))
        f1[:-1][scores[:-1] == scores[1:]] = 0  # a score keeps all boxes that have it
        best = int(f1.argmax())
        hub.update_info(BEST_SCORE, float(scores[best]))
        return {'best_f1': float(f1[best]), BEST_SCORE: float(scores[best])}


def matches(predicted: Any, truth: Any, ignored: Any) -> tuple[np.ndarray, ...]:
    """Match the boxes of an image, best first, each with the free object of the largest IoU.

    Returns:
        Score, label and whether it matches of each predicted box [N], and the labels of the objects
        [M].
    """
    order = predicted['scores'].argsort(descending=True, stable=True)
    scores, labels = predicted['scores'][order].double(), predicted['labels'][order]
    overlaps = _ious(predicted['bboxes'][order], labels, truth)
    over_ignored = (_ious(predicted['bboxes'][order], labels, ignored) >= LEAST_IOU).any(1)
    free = torch.ones(overlaps.shape[1], dtype=torch.bool)
    hits = torch.zeros(len(scores), dtype=torch.bool)
    for row in (overlaps >= LEAST_IOU).any(1).nonzero().flatten().tolist():
        most, index = (overlaps[row] * free).max(0)
        if most >= LEAST_IOU:
            hits[row], free[index] = True, False
    kept = hits | ~over_ignored
    parts = scores.cpu()[kept], labels.cpu()[kept], hits[kept], truth['labels'].cpu()
    return tuple(part.numpy() for part in parts)


def _ious(boxes: Tensor, labels: Tensor, others: Any) -> Tensor:
    from torchvision.ops import box_iou

    if not len(others.get('labels', ())):
        return torch.zeros(len(boxes), 0)
    corners = others['bboxes']
    corners = getattr(corners, 'tensor', corners).to(boxes)  # mmdet's boxes hold a tensor
    same = labels[:, None] == others['labels'].to(labels)
    return (box_iou(boxes.double(), corners.double()) * same).cpu()


def average_precision(hits: np.ndarray, num_objects: int) -> float:
    if not num_objects:
        return np.nan
    found = hits.cumsum()
    precision = found / np.arange(1, len(hits) + 1)
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    at = np.searchsorted(found / num_objects, RECALLS)
    return float(np.append(envelope, 0)[at].mean())


class PixelsByClass(ByClass):
    """IoU of each class, counted by mmseg's IoUMetric.

    Args:
        counter: The IoUMetric of the same evaluator.
    """

    measure = 'IoU'

    def __init__(self, counter: Any) -> None:
        super().__init__()
        self.counter = counter

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        num_classes = len((self.dataset_meta or {})['classes'])
        for sample in data_samples:
            predicted = sample['pred_sem_seg']['data'].squeeze()
            truth = sample['gt_sem_seg']['data'].squeeze().to(predicted)
            both, either, *_ = self.counter.intersect_and_union(
                predicted, truth, num_classes, self.counter.ignore_index
            )
            self.results.append((both.double(), either.double()))

    def compute_metrics(self, results: list) -> dict[str, float]:
        both, either = (sum(parts).numpy() for parts in zip(*results, strict=True))
        self.store([x / y if y else np.nan for x, y in zip(both, either, strict=True)])
        return {}


def with_a_box(results: Sequence[tuple[dict, dict]]) -> Sequence[tuple[dict, dict]]:
    """Add a box without pixels to results of mmdet's CocoMetric without any, for which it has no metric."""
    if any(len(found['scores']) for _, found in results):
        return results
    (truth, found), *others = results
    one: dict[str, Any] = dict(bboxes=np.zeros((1, 4)), scores=np.zeros(1), labels=np.zeros(1, int))
    if 'masks' in found:
        encode = import_module('pycocotools.mask').encode
        empty = np.zeros((truth['height'], truth['width']), np.uint8, order='F')
        one |= dict(masks=[encode(empty)], mask_scores=np.zeros(1))
    return [(truth, found | one), *others]


def add_by_class(loop: Any) -> None:
    if loop is None or not hasattr(loop, 'evaluator'):
        return
    metrics, dataset = loop.evaluator.metrics, loop.dataloader.dataset
    kinds = {type(metric).__name__: metric for metric in metrics}
    if 'CocoMetric' in kinds:
        metric = kinds['CocoMetric']
        compute = metric.compute_metrics
        metric.compute_metrics = lambda results: compute(with_a_box(results))
    added: ByClass | None = None
    steps = getattr(getattr(dataset, 'pipeline', None), 'transforms', ())
    has_boxes = any(type(step).__name__ == 'LoadAnnotations' for step in steps)
    if kinds.keys() & {'CocoMetric', 'VOCMetric'} and has_boxes:
        added = BoxesByClass()
    elif 'IoUMetric' in kinds and not kinds['IoUMetric'].format_only:
        added = PixelsByClass(kinds['IoUMetric'])
    if added is not None and dataset.metainfo.get('classes'):
        added.dataset_meta = dataset.metainfo
        metrics.append(added)
