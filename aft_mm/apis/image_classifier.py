"""Classes of images from a trained classifier."""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmcv import imrescale
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from mmengine.registry import TRANSFORMS, DefaultScope
from mmengine.utils import mkdir_or_exist
from mmpretrain.structures import DataSample
from mmpretrain.visualization import UniversalVisualizer
from PIL import Image
from rich.console import Console
from rich.progress import track

from aft_mm.checks import check_int
from aft_mm.datasets.image_files import IMAGE_SUFFIXES, read_rgb
from aft_mm.errors import UserError

from .loading import load_model

Source = str | os.PathLike | np.ndarray
LOADERS = ('LoadImageFromFile', 'mmpretrain.LoadImageFromFile', 'mmcv.LoadImageFromFile')
# A picture of fewer pixels is enlarged to be seen.
SHORT_EDGE = 224


class ImageClassifier:
    """Classify images: a file, a folder, an array, or a list of these.

    ::

        classify = ImageClassifier('config.py', 'epoch_100.pth')
        classify('photos/')[0]  # {'path': 'photos/a.jpg', 'label': 3, 'class_name': 'cat', ...}
        classify.visualize('photos/', 'drawn/')

    What happens to an image before the model sees it is what happens in a test: the pipeline of
    ``test_dataloader``.

    Args:
        config: Path of a config of mmpretrain's ImageClassifier, or the config itself.
        checkpoint: Path or http address of a checkpoint.
        device: Where to compute; by default an accelerator if there is one.
        classes: Names of the classes; by default those that the checkpoint holds. Where it holds
            none there are none: the names of a data set of the config could be another one's.

    Raises:
        UserError: a file does not exist, the checkpoint is of another model, the config is none of
            a classifier, or there are more or fewer names than classes.
    """

    def __init__(
        self,
        config: str | os.PathLike | Config,
        checkpoint: str | os.PathLike,
        device: str | torch.device | None = None,
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
        # Of an image, and what follows once it is loaded.
        steps = self.config.test_dataloader.dataset.pipeline
        self._loads = any(step['type'] in LOADERS for step in steps)
        with DefaultScope.overwrite_default_scope('mmpretrain'):
            self._pipeline = Compose([TRANSFORMS.build(step) for step in steps])
            self._of_array = Compose(
                [TRANSFORMS.build(step) for step in steps if step['type'] not in LOADERS]
            )
        # mmcv reads BGR; a data set of arrays has the order that the data preprocessor expects.
        self.takes_bgr = self._loads or takes_bgr(self.config)
        self._channels = self.config.model.backbone.get('in_channels', 3)

    def __call__(
        self, images: Source | Sequence[Source], batch_size: int = 32, progress: bool = True
    ) -> list[dict[str, Any]]:
        """Classify images.

        Args:
            images: Path of a file, of a folder (its image files, and those of folders in it, in
                the order of their paths), an array uint8 [H, W, 3] in RGB, or [H, W] or [H, W, 1]
                for a model of grey images, or a list of such.
            batch_size: Images that the model takes at once; those of one size together.
            progress: Show a progress bar on stderr.

        Returns:
            One dict for each image: ``label`` (int), ``score`` of it, ``scores`` of all classes
            (float32 [classes]), ``class_name`` (None where the checkpoint holds no names), and
            ``path`` where it comes from a file.

        Raises:
            ValueError: an image is none, a file or folder does not exist or holds none, or
                batch_size is below 1.
        """
        check_int('batch_size', batch_size, 1)
        inputs = self._as_list(images)
        results: list[dict[str, Any]] = []
        batches = range(0, len(inputs), batch_size)
        bar = dict(console=Console(stderr=True), disable=not progress)
        for start in track(batches, 'classifying', **bar):
            part = inputs[start : start + batch_size]
            for image, sample in zip(part, self._predict(part), strict=True):
                scores = sample.pred_score.float().cpu().numpy()
                label = int(scores.argmax())
                source = {} if isinstance(image, np.ndarray) else {'path': str(image)}
                results.append(
                    {
                        **source,
                        'label': label,
                        'score': float(scores[label]),
                        'scores': scores,
                        'class_name': None if self.classes is None else self.classes[label],
                    }
                )
        return results

    def preprocess(self, image: Source) -> dict[str, Any]:
        """One image as the data preprocessor takes it: ``inputs`` [C, H, W] and its sample.

        Raises:
            UserError: it is none.
        """
        try:
            if self._loads and not isinstance(image, np.ndarray):
                return self._pipeline(dict(img_path=os.fspath(image)))
            pixels = self._pixels(image)[..., :: -1 if self.takes_bgr else 1]
            size = pixels.shape[:2]
            return self._of_array(dict(img=pixels.copy(), img_shape=size, ori_shape=size))
        except UserError:
            raise
        except Exception as error:  # whatever a step of the pipeline raises on a bad file
            what = 'an array' if isinstance(image, np.ndarray) else repr(os.fspath(image))
            raise UserError(
                f'images must hold images, but {what} is none ({" ".join(str(error).split())})'
            ) from error

    def visualize(
        self,
        images: Source | Sequence[Source],
        folder: str | os.PathLike | None = None,
        batch_size: int = 32,
        progress: bool = True,
    ) -> list[np.ndarray]:
        """Draw the prediction onto each image, with the model's class names and scores.

        Args:
            images, batch_size, progress: As of a call.
            folder: Where to write the pictures, too: ``0000_cat.png`` of the image a/cat.jpg,
                ``0001.png`` of an array.

        Returns:
            uint8 [H, W, 3] for each image, RGB, small ones enlarged to be seen.
        """
        inputs = self._as_list(images)
        visualizer = UniversalVisualizer()
        if folder is not None:
            mkdir_or_exist(folder)
        drawn = []
        for number, (image, result) in enumerate(
            zip(inputs, self(inputs, batch_size, progress), strict=True)
        ):
            pixels = self._pixels(image)
            pixels = np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3)))
            enlarge = -(-SHORT_EDGE // min(pixels.shape[:2]))
            name = f'{number:04}' + (f'_{Path(result["path"]).stem}' if 'path' in result else '')
            sample = DataSample().set_pred_label(result['label']).set_pred_score(result['scores'])
            drawn.append(
                visualizer.visualize_cls(
                    imrescale(pixels, enlarge, interpolation='nearest'),
                    sample,
                    self.classes,
                    draw_gt=False,
                    name=name,
                    out_file=None if folder is None else os.path.join(folder, f'{name}.png'),
                )
            )
        return drawn

    def _as_list(self, images: Source | Sequence[Source]) -> list[Source]:
        """Files for folders, one by one."""
        alone = isinstance(images, str | os.PathLike | np.ndarray)
        found: list[Source] = []
        for image in [images] if alone else images:
            if isinstance(image, np.ndarray):
                found.append(self._checked(image))
            elif not isinstance(image, str | os.PathLike):
                raise UserError(
                    'images must be a path, an array or a list of these, got '
                    f'{type(image).__name__}'
                )
            elif Path(image).is_dir():
                files = sorted(
                    path
                    for path in Path(image).rglob('*')
                    if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()
                )
                if not files:
                    raise UserError(
                        f'images must hold images, but the folder {str(image)!r} holds '
                        f'none ({", ".join(IMAGE_SUFFIXES)})'
                    )
                found += files
            elif not Path(image).is_file():
                raise UserError(f'images must be files that exist, but {str(image)!r} does not')
            else:
                found.append(image)
        return found

    def _checked(self, image: np.ndarray) -> np.ndarray:
        """An array as [H, W, C] of the model's channels."""
        pixels = image[..., None] if image.ndim == 2 else image
        if pixels.dtype != np.uint8 or pixels.shape[2:] != (self._channels,) or not pixels.size:
            raise UserError(
                f'images must be uint8 [H, W, {self._channels}] of this model, got '
                f'{image.dtype} {list(image.shape)}'
            )
        return pixels

    def _pixels(self, image: Source) -> np.ndarray:
        """uint8 [H, W, C], RGB or grey as the model takes them."""
        if isinstance(image, np.ndarray):
            return self._checked(image)
        pixels = read_rgb(image)[0]
        grey = self._channels == 1
        return np.asarray(Image.fromarray(pixels).convert('L'))[..., None] if grey else pixels

    def _predict(self, images: Sequence[Source]) -> list[DataSample]:
        """The predictions of images, neighbours of one size at once."""
        samples = [self.preprocess(image) for image in images]
        predictions: list[DataSample] = []
        with torch.no_grad():
            for _, same in itertools.groupby(samples, lambda sample: sample['inputs'].shape):
                predictions += self.model.test_step(pseudo_collate(list(same)))
        return predictions


def takes_bgr(config: Config) -> bool:
    """Whether the images of a config are BGR until its data preprocessor turns them around."""
    settings = config.get('data_preprocessor') or {}
    own = (config.get('model') or {}).get('data_preprocessor') or {}
    for part in (settings, own, settings.get('preprocessor') or {}, own.get('preprocessor') or {}):
        for key in ('to_rgb', 'bgr_to_rgb'):
            if part.get(key) is not None:
                return bool(part[key])
    return False
