"""A trained model from its config and checkpoint."""

import os
from typing import Any

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.registry import MODELS, DefaultScope
from mmengine.runner import CheckpointLoader
from torch import nn

import aft_mm.registry  # noqa: F401, the safe loading of checkpoints
from aft_mm.checkpoint import load_weights
from aft_mm.config.reading import check_checkpoint, read_config
from aft_mm.errors import UserError

#: Who draws from the model of a config, or reads with it, and the entry of the config that tells;
#: the first that is there decides.
ENTRIES = {
    'Translator': 'subwords',
    'SpeechRecognizer': 'units',
    'SuperResolver': 'source_shape',
    'PointCloudGenerator': 'point_cloud',
    'ImageGenerator': 'image_shape',
}

#: mmpretrain's classifier, as a config may name it.
CLASSIFIERS = ('ImageClassifier', 'mmpretrain.ImageClassifier')


def task_of(config: Config) -> str:
    """The name of the class that draws from the model of a config, TextGenerator for the rest."""
    return next((name for name, entry in ENTRIES.items() if entry in config), 'TextGenerator')


def check_draws(config: Config) -> None:
    """Raise a :class:`UserError` unless the model of a config is an autoregressive one."""
    if 'decoder' not in (config.get('model') or {}):
        raise UserError(
            f'{config.filename} has no autoregressive model, with a decoder, to draw from'
        )


def check_task(config: Config, name: str) -> None:
    """Raise a :class:`UserError` if a class other than ``name`` is for a config's model."""
    if name == 'ImageClassifier':
        if (config.get('model') or {}).get('type') not in CLASSIFIERS:
            raise UserError(
                f'{config.filename} is no config of an image classifier: its model is '
                f'{(config.get("model") or {}).get("type")!r}'
            )
        return
    found = task_of(config)
    if name != 'SpeechRecognizer':
        check_draws(config)
    if found != name:
        reason = (
            f'has {ENTRIES[found]}'
            if found in ENTRIES
            else (f'has none of {", ".join(ENTRIES.values())}')
        )
        raise UserError(
            f'{config.filename} is a config for {found} and not for {name}, because it {reason}'
        )


def build_model(config: Config) -> nn.Module:
    """The model of a config in its scope, with the config's data preprocessor, as a Runner's."""
    settings = config.model.copy()
    if config.get('data_preprocessor') is not None:
        settings.setdefault('data_preprocessor', config.data_preprocessor)
    with DefaultScope.overwrite_default_scope(config.get('default_scope', 'mmengine')):
        return MODELS.build(settings)


def load_model(
    config: str | os.PathLike | Config,
    checkpoint: str | os.PathLike | None,
    device: str | torch.device | None = None,
    task: str | None = None,
) -> tuple[Config, nn.Module]:
    """Build the model of a config and load a checkpoint of training, safely and completely.

    Args:
        config: Path of the config, or the config itself.
        checkpoint: Path or address of the checkpoint; None for random weights, seed 0.
        device: Where the model shall be; by default an accelerator if there is one.
        task: Name of the class that will draw from the model, if that is all it is for.

    Returns:
        The config and the model, in evaluation mode and without gradients. Its ``dataset_meta`` is
        what the checkpoint tells of its data, such as the names of classes.

    Raises:
        UserError: a file does not exist, the config is for another task or for missing libraries,
            or the checkpoint is of another model.
        pickle.UnpicklingError: the checkpoint is damaged, or holds more than training state.
    """
    if not isinstance(config, Config):
        config = read_config(os.fspath(config))
    if task is not None:
        check_task(config, task)
    meta: dict[str, Any] = {}
    if checkpoint is None:
        torch.manual_seed(0)
        model = build_model(config)
    else:
        check_checkpoint(os.fspath(checkpoint))
        model = build_model(config)
        weights = CheckpointLoader.load_checkpoint(os.fspath(checkpoint), map_location='cpu')
        load_weights(model, weights, name=str(config.filename))
        meta = weights.get('meta') or {}
    # As mmdet and mmseg call it: what the training said about its data.
    model.dataset_meta = meta.get('dataset_meta') or {}
    return config, model.to(device or get_device()).eval().requires_grad_(False)
