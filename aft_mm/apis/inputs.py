"""What the pipelines of a config make of its data, or of files of your own."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from mmcv.transforms import Compose
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.registry import DATASETS, MODELS, DefaultScope
from torch import Tensor

from aft_mm.checks import check_int
from aft_mm.config.reading import check_data
from aft_mm.datasets import UnusableFile, read_rgb
from aft_mm.errors import UserError

SPLITS = ('train', 'val', 'test')


def build_dataset(config: Config, split: str = 'test') -> Any:
    """The data set of a split of a config, with its pipeline.

    Raises:
        UserError: the config has none, its files are not there, or no sample is left of them.
    """
    if not config.get(f'{split}_dataloader'):
        raise UserError(f'{config.filename} has no {split}_dataloader')
    check_data(config, split)
    with DefaultScope.overwrite_default_scope(config.get('default_scope', 'mmengine')):
        try:
            return DATASETS.build(config[f'{split}_dataloader'].dataset)
        except ValueError as error:
            if 'need at least one array' not in str(error):  # as mmengine joins the samples
                raise
            raise UserError(
                f'{split}_dataloader.dataset of {config.filename} is empty: no file '
                'that it reads has what it takes, such as objects of its classes'
            ) from error


def class_names(dataset: Any, count: int) -> list[str]:
    """The names of ``count`` classes that a data set tells, or their numbers."""
    names = (getattr(dataset, 'metainfo', None) or {}).get('classes') or ()
    names = [names] if isinstance(names, str) else list(names)
    return (
        [str(name) for name in names]
        if len(names) == count
        else [str(index) for index in range(count)]
    )


def spread_samples(dataset: Any, num: int) -> list[dict]:
    """``num`` samples, evenly spread over a data set, which is often sorted by class.

    Raises:
        UserError: it has fewer.
    """
    check_int('--num', num, 1)
    if num > len(dataset):
        raise UserError(
            f'--num must be at most the {len(dataset)} samples of the data set, got {num}'
        )
    return [dataset[int(index)] for index in np.linspace(0, len(dataset) - 1, num).round()]


def load_images(
    config: Config, paths: Sequence[str | os.PathLike], split: str = 'test'
) -> list[dict]:
    """Image files of any kind through the pipeline of a classifier's split.

    Raises:
        UserError: a file is no image.
    """
    pipeline = list(config[f'{split}_dataloader'].dataset.pipeline)
    reads_files = pipeline[0].type.endswith('LoadImageFromFile')
    with DefaultScope.overwrite_default_scope(config.get('default_scope', 'mmengine')):
        steps = Compose(pipeline[1:] if reads_files else pipeline)
    samples = []
    for path in map(os.fspath, paths):
        image, _ = read_image(path)
        if config.model.backbone.get('in_channels', 3) == 1:
            image = image.mean(-1, keepdims=True).astype(np.uint8)
        elif takes_bgr(config):
            image = np.ascontiguousarray(image[..., ::-1])
        size = image.shape[:2]
        samples.append(steps(dict(img=image, img_path=path, img_shape=size, ori_shape=size)))
    return samples


def read_image(path: str | os.PathLike) -> tuple[np.ndarray, list[str]]:
    """As :func:`aft_mm.datasets.read_rgb`, for a file that a person named.

    Raises:
        UserError: it is no image.
    """
    try:
        return read_rgb(os.fspath(path))
    except UnusableFile as error:
        raise UserError(str(error)) from error


def takes_bgr(config: Config) -> bool:
    """Whether the images of a config are BGR until its data preprocessor turns them around."""
    settings = config.get('data_preprocessor') or {}
    own = (config.get('model') or {}).get('data_preprocessor') or {}
    for part in (settings, own, settings.get('preprocessor') or {}, own.get('preprocessor') or {}):
        for key in ('to_rgb', 'bgr_to_rgb'):
            if part.get(key) is not None:
                return bool(part[key])
    return False


def shown_image(config: Config, sample: dict) -> np.ndarray:
    """The image of a packed sample, before it is normalised: uint8 [H, W, 3], RGB."""
    image = sample['inputs'].numpy().transpose(1, 2, 0)
    if image.shape[-1] == 1:
        return image.repeat(3, axis=-1)
    return np.ascontiguousarray(image[..., ::-1]) if takes_bgr(config) else image


def network_inputs(config: Config, samples: Sequence[dict]) -> Tensor:
    """The normalised batch [B, C, H, W] of packed samples, as the model gets it in a test.

    Raises:
        UserError: the images have different sizes.
    """
    sizes = {tuple(sample['inputs'].shape) for sample in samples}
    if len(sizes) > 1:
        raise UserError(
            f'the images of a batch must have one size, got {sorted(sizes)}; give one at a time'
        )
    # A classifier's stands outside of its model, where mmengine's Runner looks for it.
    settings = config.model.get('data_preprocessor') or config.get('data_preprocessor') or {}
    with DefaultScope.overwrite_default_scope(config.get('default_scope', 'mmengine')):
        preprocessor = MODELS.build({'type': 'ClsDataPreprocessor', **settings})
    with torch.no_grad():
        return preprocessor(pseudo_collate(list(samples)), False)['inputs']
