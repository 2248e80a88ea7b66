import json
import operator
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.config import Config
from torch import Tensor

from aft_mm.apis.loading import build_model
from aft_mm.errors import UserError
from aft_mm.structures import DATASET_META

from .files import FORMATS
from .graphs import Graph, describe_images, describe_task, type_of
from .image_graphs import IMAGE_MODELS

# torch warns about its own reading of files.
quiet = partial(warnings.catch_warnings, action='ignore')


def is_exported(path: str | os.PathLike) -> bool:
    return Path(path).suffix in FORMATS


def load_exported(config: Config, path: str | os.PathLike) -> Any:
    """Return the model of a config whose network is an exported file, on the CPU.

    Raises:
        UserError: The file is missing, says nothing about itself or is for another model.
    """
    file = FORMATS[Path(path).suffix](Path(path))
    if not file.path.is_file():
        raise UserError(f'checkpoint {str(path)!r} does not exist')
    file.check_packages()
    try:
        with quiet():
            metadata = file.metadata()
    except Exception as error:  # runtimes have types of their own
        reason = str(error).strip().partition('\n')[0] or type(error).__name__
        raise UserError(
            f'{str(path)!r} must be written by `aft_mm export`, got a file that {file.runtime} '
            f'cannot read: {reason}'
        ) from error
    kind, task, model = type_of(config), metadata.get('task'), build_model(config)
    if kind not in IMAGE_MODELS or task != describe_task(config, model)['task']:
        raise UserError(
            f'{str(path)!r} must be exported by `aft_mm export` from the model of '
            f'{config.filename}, without --backbone, got '
            f'{f"a file for {task}" if task else "a file without metadata"}'
        )
    size, channels = json.loads(metadata['size']), len(json.loads(metadata['mean']))
    is_open = json.loads(metadata['dynamic'])
    wrapper = IMAGE_MODELS[kind]
    example = dict(image=torch.empty(1, channels, *size))
    model.dataset_meta = {key: json.loads(metadata[key]) for key in DATASET_META if key in metadata}
    expected = describe_images(config, model, channels)
    stored = {**metadata, **{key: json.loads(metadata[key]) for key in ('mean', 'std')}}
    equal: dict[str, Any] = dict(mean=np.allclose, std=np.allclose, channels=operator.eq)
    for key, are_equal in equal.items():
        if not are_equal(stored.get(key), expected.get(key)):
            raise UserError(
                f'{key} of {str(path)!r} must be that of {config.filename}, {expected.get(key)}, got '
                f'{stored.get(key)}; export the checkpoint with it'
            )
    with quiet():
        call = file.load(Graph('', model, example, [*wrapper.outputs]))

    def run(inputs: Tensor) -> list[Any]:
        images, mask = inputs[:, :channels], inputs[:, channels:]
        if not mask.all():
            raise UserError(
                f'the graph of {str(path)!r} knows no padding, which the data_preprocessor adds to '
                f'an image; use the checkpoint'
            )
        if not is_open and list(images.shape[2:]) != size:
            given, taken = (f'{high} x {wide}' for high, wide in (images.shape[2:], size))
            raise UserError(
                f'the graph of {str(path)!r} takes images of {taken} pixels (height x width), got '
                f'{given}; export with --size {given.replace(" x ", " ")}, change the test pipeline of '
                f'{config.filename}, or use the checkpoint'
            )
        return [call(dict(image=image.contiguous())) for image in images.split(1)]

    wrapper.install(model, run)
    return model.requires_grad_(False).eval()
