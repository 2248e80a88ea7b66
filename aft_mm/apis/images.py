"""Classes, boxes or masks of images, with pictures."""

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from mmengine.registry import MODELS, VISUALIZERS, DefaultScope
from mmengine.structures import PixelData
from mmengine.utils import mkdir_or_exist
from PIL import Image

from aft_mm.checks import check_flag, check_int, check_probability, described
from aft_mm.config.texts import type_name
from aft_mm.errors import UnusableFile, UserError
from aft_mm.images import IMAGE_SUFFIXES, find_images, image_size, not_read, read_image
from aft_mm.models.decoding import evaluating
from aft_mm.openmmlab import warn
from aft_mm.progress import progress as with_bar
from aft_mm.structures import BEST_SCORE
from aft_mm.visualization.figures import class_colours, literal_text, printable

from .loading import (
    COMMANDS,
    Checkpoint,
    ConfigSource,
    Device,
    FilePath,
    ImageSource,
    ImageSources,
    as_config,
    as_list,
    is_classifier,
    load_model,
    pipeline_of,
    task_of,
)

Transform = Callable[[dict[str, Any]], dict[str, Any]]
SHORT_EDGE = 224  # small images are magnified to it [px]
LONG_EDGE = 4096  # but not beyond this one
NO_LABEL = 'no label'


class ImageClassifier:
    """Classify images: a file, a folder, an array, a PIL image, or a list of these.

    Args:
        classes: Names of the classes; by default those stored in the checkpoint, if any.

    Raises:
        UserError: As for :func:`load_model`, or the number of names is not the number of classes.
    """

    def __init__(
        self,
        config: ConfigSource,
        checkpoint: Checkpoint,
        device: Device = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        self.config, self.model = load_model(config, checkpoint, device, 'ImageClassifier')
        if classes is None:
            classes = self.model.dataset_meta.get('classes')
        self.classes = None if classes is None else tuple(classes)
        number = getattr(self.model.head, 'num_classes', None)
        if self.classes is not None and number not in (None, len(self.classes)):
            raise UserError(
                f'classes must be {number} names, one for each output of the head, got '
                f'{len(self.classes)}'
            )
        steps = pipeline_of(self.config)
        self._loads = loads_files(self.config)
        with DefaultScope.overwrite_default_scope('mmpretrain'):
            self._pipeline: Transform = Compose(steps)
            self._of_array: Transform = Compose([step for step in steps if not loads_file(step)])
        self.takes_bgr = takes_bgr(self.config)
        self.label_rule = label_rule(self.model)
        self._channels = self.config.model.backbone.get('in_channels', 3)
        self._has_warned = False

    def __call__(
        self, images: ImageSources, batch_size: int = 32, progress: bool = True
    ) -> list[dict[str, Any]]:
        """Classify images.

        Args:
            images: Path of a file or a folder (all image files below it, by path), an array or PIL
                image as in :func:`aft_mm.images.rgb_of`, or a list.
            batch_size: Images per forward pass; only consecutive images of one size are batched.
            progress: Show a progress bar on stderr.

        Returns:
            One dict per image: ``label`` (int), its ``score``, the ``scores`` of all classes
            (float32 [classes]), ``class_name`` or None, and ``path`` of a file. Of a multi-label
            model ``labels`` and ``class_names``, those that the head accepts, the best first,
            instead of ``label``, ``score`` and ``class_name``.

        Raises:
            ValueError: An image cannot be read or has another shape or type.
        """
        check_int('batch_size', batch_size, 1)
        check_flag('progress', progress)
        inputs = self._as_list(images)
        results: list[dict[str, Any]] = []
        batches = range(0, len(inputs), batch_size)
        for start in with_bar(batches, 'classifying', shown=progress):
            part = inputs[start : start + batch_size]
            samples = [self.preprocess(image) for image in part]
            for sentence in filter(None, map(self.unlike_training, samples)):
                if not self._has_warned:
                    warn(sentence)
                self._has_warned = True
            predictions = predict_by_size(self.model, samples)
            for image, sample in zip(part, predictions, strict=True):
                source = {} if isinstance(image, np.ndarray) else {'path': str(image)}
                results.append(source | self._result(sample))
        return results

    def _result(self, sample: Any) -> dict[str, Any]:
        scores = sample.pred_score.float().cpu().numpy()
        names = self.classes or [None] * len(scores)
        if self.label_rule:
            labels = sorted(sample.pred_label.tolist(), key=lambda label: -scores[label])
            named = [names[label] for label in labels]
            return dict(labels=labels, scores=scores, class_names=named)
        label = int(scores.argmax())
        score = float(scores[label])
        return dict(label=label, score=score, scores=scores, class_name=names[label])

    def preprocess(self, image: ImageSource) -> dict[str, Any]:
        """Return the packed sample of one image: ``inputs`` [C, H, W] and ``data_samples``.

        Raises:
            UserError: It is not an image.
        """
        try:
            if self._loads and isinstance(image, str | os.PathLike):
                image_size(image)  # refuses what is too large
                return self._pipeline(dict(img_path=os.fspath(image)))
            return self._of_array(loaded(self._pixels(image), self.takes_bgr))
        except Exception as error:  # steps raise anything on a bad file
            if isinstance(error, UserError) and not isinstance(error, UnusableFile):
                raise
            what = described(str(image) if isinstance(image, os.PathLike) else image)
            reason = ' '.join(str(error).split())
            raise UserError(f'images must be readable images, got {what} ({reason})') from error

    def unlike_training(self, sample: dict[str, Any]) -> str:
        """Return a sentence if the packed sample of an image has another size than those of training."""
        size = self.config.model.backbone.get('img_size')
        trained = (size, size) if isinstance(size, int) else tuple(size or ())
        given = tuple(sample['inputs'].shape[-2:])
        if not trained or given == trained:
            return ''
        return (
            'the model was trained on images of {} x {} px and gets one of {} x {} px, for which it may '
            'be wrong; add a Resize to test_dataloader.dataset.pipeline'
        ).format(*trained, *given)

    def visualize(
        self,
        images: ImageSources,
        folder: FilePath | None = None,
        batch_size: int = 32,
        progress: bool = True,
    ) -> list[np.ndarray]:
        """Draw the predicted class names and scores onto each image.

        Args:
            folder: Folder to write the pictures to, such as ``0000_cat.png`` for a/cat.jpg.

        Returns:
            RGB uint8 [H, W, 3] per image; small images are magnified.
        """
        inputs = self._as_list(images)
        if folder is not None:
            mkdir_or_exist(folder)
        pictures = []
        for number, (image, result) in enumerate(
            zip(inputs, self(inputs, batch_size, progress), strict=True)
        ):
            name = f'{number:04}' + (f'_{Path(result["path"]).stem}' if 'path' in result else '')
            pictures.append(self.draw(image, result))
            if folder is not None:
                Image.fromarray(pictures[-1]).save(os.path.join(folder, f'{name}.png'))
        return pictures

    def draw(self, image: ImageSource, result: dict[str, Any]) -> np.ndarray:
        """Draw the class names and scores of a result of :meth:`__call__` onto its image.

        Returns:
            RGB uint8 [H, W, 3]; a small image is magnified.
        """
        pixels = self._pixels(image)
        pixels = np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3)))
        pixels = magnified(pixels, magnification(pixels))
        unit = float(np.clip(min(pixels.shape[:2]) / 224, 0.3, 3))
        visualizer = VISUALIZERS.get('mmpretrain.UniversalVisualizer')()
        visualizer.set_image(pixels)
        style = dict(visualizer.DEFAULT_TEXT_CFG, size=int(7 * unit))
        with literal_text():
            caption = '\n'.join(map(printable, self.captions(result)))
            text = visualizer.ax_save.text(5 * unit, 5 * unit, caption, **style)
            room = len(pixels) - 10 * unit
            share = min(1, room / text.get_window_extent().height)
            text.set_size(max(2, share * text.get_size()))
            drawn: np.ndarray = visualizer.get_image()
        return drawn

    def captions(self, result: dict[str, Any]) -> list[str]:
        """Return the class names of a result of :meth:`__call__`, each with its score."""
        labels = result['labels'] if self.label_rule else [result['label']]
        names = [self.classes[label] if self.classes else f'class {label}' for label in labels]
        scores = result['scores'][labels]
        pairs = zip(names, scores, strict=True)
        return [f'{name} {score:.2f}' for name, score in pairs] or [NO_LABEL]

    def _as_list(self, images: ImageSources) -> list[FilePath | np.ndarray]:
        sources: list[FilePath | np.ndarray] = []
        for image in as_list(images):
            if not isinstance(image, str | os.PathLike):
                sources.append(self._pixels(image))
            elif Path(image).is_dir():
                files, others = find_images(Path(image))
                passed_over = not_read(others)
                if not files:
                    raise UserError(
                        f'images must be folders with images ({", ".join(IMAGE_SUFFIXES)}), got '
                        f'{str(image)!r}' + (passed_over and f': {passed_over}')
                    )
                if passed_over:
                    warn(f'folder {str(image)!r}: {passed_over}')
                sources += [Path(image, name) for name in files]
            elif not Path(image).is_file():
                raise UserError(f'images must be files that exist, got {str(image)!r}')
            else:
                sources.append(image)
        return sources

    def _pixels(self, image: ImageSource) -> np.ndarray:
        if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.size:
            if image.shape[2:] == (self._channels,):  # perhaps of other than 1 or 3
                return image
        return read_image(image, self._channels)[0]


def loaded(pixels: np.ndarray, is_bgr: bool) -> dict[str, Any]:
    """Return what the step of a pipeline makes that loads an image, here RGB or grey."""
    size = pixels.shape[:2]
    return dict(img=pixels[..., :: -1 if is_bgr else 1].copy(), img_shape=size, ori_shape=size)


def label_rule(classifier: Any) -> dict[str, Any]:
    """Return the ``thr`` or else ``topk`` by which a multi-label head accepts labels, else nothing."""
    head = getattr(classifier, 'head', None)
    if not isinstance(head, MODELS.get('mmpretrain.MultiLabelClsHead')):
        return {}
    return dict(topk=head.topk) if head.thr is None else dict(thr=head.thr)


def probabilities(classifier: Any, outputs: torch.Tensor) -> torch.Tensor:
    return outputs.sigmoid() if label_rule(classifier) else outputs.softmax(1)


def magnification(image: np.ndarray) -> int:
    short, long = sorted(image.shape[:2])
    factor: int = min(-(-SHORT_EDGE // short), LONG_EDGE // long)
    return max(1, factor)


def magnified(image: np.ndarray, times: int) -> np.ndarray:
    height, width = image.shape[:2]
    return cv2.resize(image, (times * width, times * height), interpolation=cv2.INTER_NEAREST)


@torch.no_grad()
def predict_by_size(model: Any, samples: Sequence[dict[str, Any]]) -> list[Any]:
    """Predict packed samples, consecutive ones of one size in a batch."""
    predictions: list[Any] = []
    with evaluating(model):
        for _, same in itertools.groupby(samples, lambda sample: sample['inputs'].shape):
            predictions += model.test_step(pseudo_collate(list(same)))
    return predictions


def loads_files(config: Config) -> bool:
    """Return whether the test pipeline of a config reads image files, by mmcv and in BGR."""
    dataset = (config.get('test_dataloader') or {}).get('dataset') or {}
    return any(map(loads_file, dataset.get('pipeline') or ()))


def of_images(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the steps of a pipeline without those that load annotations."""
    return [step for step in steps if not type_name(step['type']).endswith('LoadAnnotations')]


def loads_file(step: dict[str, Any]) -> bool:
    return type_name(step['type']) == 'LoadImageFromFile'


def takes_bgr(config: Config) -> bool:
    """Return whether images are BGR before the data preprocessor: read by mmcv, or converted."""
    if loads_files(config):
        return True
    settings = config.get('data_preprocessor') or {}
    of_model = (config.get('model') or {}).get('data_preprocessor') or {}
    nested = [part.get('preprocessor') or {} for part in (settings, of_model)]
    for part in (settings, of_model, *nested):
        for key in ('to_rgb', 'bgr_to_rgb'):
            if part.get(key) is not None:
                return bool(part[key])
    return False


EDGE = 2  # pixels between a label and the edge of a picture
MOST_CLASSES = 5  # of an image, the best first
SCORE = 0.3  # minimum of a box, if the checkpoint has none
VISUALIZER = {'mmdet': 'mmdet.DetLocalVisualizer', 'mmseg': 'mmseg.SegLocalVisualizer'}


@dataclass
class Prediction:
    """The prediction for an image.

    Args:
        path: That of a file, '' of an array or PIL image.
        found: A dict per class, the five best, per box or per class of a mask: ``class_name``,
            ``label``, ``score`` or, of pixels, ``share``, and ``box``, x1, y1, x2, y2 [px]. Of a
            multi-label classifier also all accepted classes, and ``accepted``.
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
        checkpoint: Checkpoint,
        device: Device = None,
        score: float | None = None,
    ) -> None:
        config = as_config(config)
        self.scope = config.get('default_scope', 'mmengine')
        check_probability('score', SCORE if score is None else score)
        if is_classifier(config):
            self.classifier = ImageClassifier(config, checkpoint, device)
            return
        if self.scope not in VISUALIZER:
            raise UserError(
                f'{config.filename} must be the config of a classifier, detector or segmentor; '
                f'for this one use `aft_mm {COMMANDS[task_of(config)][0]}`'
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
        steps = of_images(pipeline_of(config))
        self.takes_bgr = takes_bgr(config)
        with DefaultScope.overwrite_default_scope(self.scope):
            self.pipeline = Compose(steps)
            self.of_array = Compose([step for step in steps if not loads_file(step)])
            # build() would return that of an earlier predictor, with its classes.
            self.visualizer = VISUALIZERS.get(VISUALIZER[self.scope])()
        names = [printable(name) for name in self.classes]
        palette = palette_of(meta.get('palette'), len(names))
        self.visualizer.dataset_meta = dict(classes=names, palette=palette)
        self.visualizer.draw_texts = partial(
            draw_inside, self.visualizer, self.visualizer.draw_texts
        )

    def __call__(self, images: ImageSources) -> list[Prediction]:
        """Predict images, those of one size in one batch.

        Args:
            images: Path of a file, an array or PIL image as in :func:`aft_mm.images.rgb_of`, or a
                list.

        Raises:
            UserError: An image cannot be read.
        """
        given = as_list(images)
        if not given:
            return []
        if hasattr(self, 'classifier'):
            return self._classify(given)
        pictures = [read_image(image, 3)[0] for image in given]
        files = [os.fspath(one) if isinstance(one, str | os.PathLike) else '' for one in given]
        samples = [
            self.pipeline(dict(img_path=path, img_id=index))
            if path
            else self.of_array(dict(loaded(image, self.takes_bgr), img_path='', img_id=index))
            for index, (path, image) in enumerate(zip(files, pictures, strict=True))
        ]
        with DefaultScope.overwrite_default_scope(self.scope):
            results = predict_by_size(self.model, samples)
        make = self._boxes if self.scope == 'mmdet' else self._mask
        with literal_text():
            return [make(*parts) for parts in zip(files, pictures, results, strict=True)]

    def _classify(self, images: Sequence[ImageSource]) -> list[Prediction]:
        inputs = self.classifier._as_list(images)
        results = self.classifier(inputs, len(images), progress=False)
        return [
            Prediction(
                result.get('path', ''),
                self._best(result['scores'], result.get('labels')),
                self.classifier.draw(image, result),
            )
            for image, result in zip(inputs, results, strict=True)
        ]

    def _best(self, scores: np.ndarray, accepted: list[int] | None) -> list[dict[str, Any]]:
        names = self.classifier.classes or [None] * len(scores)
        first = accepted or []  # of equal scores
        best = sorted(range(len(scores)), key=lambda label: (-scores[label], label not in first))
        return [
            dict(class_name=names[label], label=label, score=float(scores[label]))
            | ({} if accepted is None else dict(accepted=label in accepted))
            for label in best[: max(MOST_CLASSES, len(first))]
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
