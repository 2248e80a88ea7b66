"""Classes, boxes or masks of image files, with pictures."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.registry import TRANSFORMS, VISUALIZERS, DefaultScope
from mmengine.structures import PixelData
from torch import nn

from aft_mm.checks import check_path, check_probability
from aft_mm.config.reading import read_config
from aft_mm.errors import UserError
from aft_mm.images import read_rgb
from aft_mm.structures import BEST_SCORE
from aft_mm.visualization.figures import class_colours, literal_text, printable

from .image_classifier import ImageClassifier, magnification, magnified, predict_by_size
from .loading import CLASSIFIERS, ConfigSource, Device, FilePath, as_list, load_model, task_of

#: Command for models without an image as input.
OTHERS = {
    'Translator': 'translate',
    'SpeechRecognizer': 'transcribe',
    'SuperResolver': 'super-resolve',
}
EDGE = 2  # pixels between a label and the edge of a picture
MOST_CLASSES = 5  # of an image, the best first
SCORE = 0.3  # minimum of a box, if the checkpoint has none
VISUALIZER = {'mmdet': 'mmdet.DetLocalVisualizer', 'mmseg': 'mmseg.SegLocalVisualizer'}


@dataclass
class Prediction:
    """The prediction for an image.

    Args:
        found: A dict per class, the five best, per box or per class of a mask: ``class_name``,
            ``label``, ``score`` or, of pixels, ``share``, and ``box``, x1, y1, x2, y2 [px].
        picture: The image with the prediction, RGB uint8 [H, W, 3]; a small image is magnified.
        mask: Class of each pixel, uint8 [H, W], of a segmentor.
    """

    path: str
    found: list[dict[str, Any]]
    picture: np.ndarray
    mask: np.ndarray | None = None


class ImagePredictor:
    """Predict classes, boxes or masks of images, depending on the model.

    Args:
        config: Config of a classifier, detector or segmentor, or its path.
        score: Minimum score of a box; by default the checkpoint's, with the best F1 in its
            validation, or 0.3.
    """

    def __init__(
        self,
        config: ConfigSource,
        checkpoint: FilePath | nn.Module,
        device: Device = None,
        score: float | None = None,
    ) -> None:
        if not isinstance(config, Config):
            config = read_config(os.fspath(config))
        self.scope = config.get('default_scope', 'mmengine')
        check_probability('score', SCORE if score is None else score)
        if (config.get('model') or {}).get('type') in CLASSIFIERS:
            self.classifier = ImageClassifier(config, checkpoint, device)
            return
        if self.scope not in VISUALIZER:
            raise UserError(
                f'{config.filename} must be the config of a classifier, detector or segmentor; '
                f'for this one use `aft_mm {OTHERS.get(task_of(config), "sample")}`'
            )
        _, self.model = load_model(config, checkpoint, device)
        meta = self.model.dataset_meta
        self.classes = tuple(meta.get('classes') or ())
        if not self.classes:
            raise UserError(
                f'checkpoint {str(checkpoint)!r:.80} must hold the names of the classes, as those '
                'written by `aft_mm train` do'
            )
        self.score = meta.get(BEST_SCORE, SCORE) if score is None else score
        check_probability(f'{BEST_SCORE} of checkpoint {str(checkpoint)!r:.80}', self.score)
        steps = config.test_dataloader.dataset.pipeline
        with DefaultScope.overwrite_default_scope(self.scope):
            shown = [step for step in steps if not step['type'].endswith('LoadAnnotations')]
            self.pipeline = Compose([TRANSFORMS.build(step) for step in shown])
            self.visualizer = VISUALIZERS.build(dict(type=VISUALIZER[self.scope], name='predict'))
        names = [printable(name) for name in self.classes]
        palette = palette_of(meta.get('palette'), len(names))
        self.visualizer.dataset_meta = dict(classes=names, palette=palette)
        self.visualizer.draw_texts = partial(
            draw_inside, self.visualizer, self.visualizer.draw_texts
        )

    def __call__(self, paths: FilePath | Sequence[FilePath]) -> list[Prediction]:
        """Predict image files, those of one size in one batch.

        Raises:
            UserError: An image cannot be read.
            ValueError: A path is of another type.
        """
        given = as_list(paths, str, os.PathLike)
        for path in given:
            check_path('paths', path)
        files = [os.fspath(path) for path in given]
        if not files:
            return []
        if hasattr(self, 'classifier'):
            return self._classify(files)
        pictures = [read_rgb(path)[0] for path in files]
        samples = [
            self.pipeline(dict(img_path=path, img_id=index)) for index, path in enumerate(files)
        ]
        with DefaultScope.overwrite_default_scope(self.scope):
            results = predict_by_size(self.model, samples)
        make = self._boxes if self.scope == 'mmdet' else self._mask
        with literal_text():
            return [make(*parts) for parts in zip(files, pictures, results, strict=True)]

    def _classify(self, paths: Sequence[str]) -> list[Prediction]:
        results = self.classifier(paths, len(paths), progress=False)
        return [
            Prediction(
                result['path'],
                self._best(result['scores']),
                self.classifier.draw(result['path'], result),
            )
            for result in results
        ]

    def _best(self, scores: np.ndarray) -> list[dict[str, Any]]:
        names = self.classifier.classes or [None] * len(scores)
        return [
            dict(class_name=names[label], label=label, score=float(scores[label]))
            for label in np.argsort(-scores, kind='stable')[:MOST_CLASSES].tolist()
        ]

    def _boxes(self, path: str, image: np.ndarray, result: Any) -> Prediction:
        instances = result.pred_instances.cpu()
        instances = instances[instances.scores >= self.score]
        columns = (instances.labels, instances.scores, instances.bboxes)
        found = [
            dict(class_name=self.classes[label], label=label, score=score, box=box)
            for label, score, box in zip(*(x.tolist() for x in columns), strict=True)
        ]
        times = magnification(image)
        instances.bboxes = instances.bboxes * times
        if 'masks' in instances:
            instances.masks = _magnified(instances.masks, times)
        sample = result.cpu()
        sample.pred_instances = instances
        self.visualizer.add_datasample(
            'predict',
            magnified(image, times),
            sample,
            draw_gt=False,
            pred_score_thr=-1.0,  # mmdet leaves out a box that has exactly this score
        )
        return Prediction(path, found, self.visualizer.get_image())

    def _mask(self, path: str, image: np.ndarray, result: Any) -> Prediction:
        mask = result.pred_sem_seg.data[0].cpu().numpy().astype(np.uint8)
        labels, counts = np.unique(mask, return_counts=True)
        found = [
            dict(class_name=self.classes[label], label=label, share=count / mask.size)
            for label, count in zip(labels.tolist(), counts.tolist(), strict=True)
        ]
        times = magnification(image)
        sample = result.cpu()
        sample.pred_sem_seg = PixelData(data=_magnified(sample.pred_sem_seg.data, times))
        self.visualizer.add_datasample('predict', magnified(image, times), sample, draw_gt=False)
        return Prediction(path, found, self.visualizer.get_image(), mask)


def palette_of(given: Any, number: int) -> list[tuple[int, ...]]:
    """Return the palette of a data set, or colours that differ if it has none for each class."""
    # mmseg makes up colours for a data set without a palette.
    random = np.random.RandomState(42).randint(0, 255, (number, 3)).tolist()
    if not isinstance(given, list | tuple) or len(given) < number or given == random:
        given = class_colours(number).tolist()
    return [*map(tuple, given)]


def draw_inside(visualizer: Any, draw_texts: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Draw texts as mmengine's Visualizer, and move those that the picture's edges cut into it."""
    axes = visualizer.ax_save
    before = len(axes.texts)
    draw_texts(*args, **options)
    low, high = axes.bbox.min + EDGE, axes.bbox.max - EDGE
    for text in axes.texts[before:]:
        extent = text.get_window_extent()
        # The beginning of a text that is too long stays.
        move = np.minimum(0, high - extent.max)
        move += np.maximum(0, low - (extent.min + move))
        place = axes.transData.transform(text.get_position()) + move
        text.set_position(axes.transData.inverted().transform(place))
    return visualizer


def _magnified(pixels: torch.Tensor, times: int) -> torch.Tensor:
    return pixels.repeat_interleave(times, -2).repeat_interleave(times, -1)
