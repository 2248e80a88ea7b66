"""Models by name, through mmpretrain's ModelHub."""

import fnmatch
import functools
import os
from importlib import import_module
from typing import Any

import torch
from mmengine.config import Config
from mmengine.device import get_device
from modelindex.load_model_index import load
from modelindex.models.Model import Model
from torch import nn

from aft_mm.checks import check_text
from aft_mm.config.finding import INDEX, install_root, our_config
from aft_mm.config.reading import read_config
from aft_mm.errors import UserError

from .loading import build_model, load_model


@functools.cache
def register_models() -> dict[str, Model]:
    """Register our models in mmpretrain's ModelHub, once, and return them by name.

    Raises:
        UserError: The package was installed without its configs.
    """
    path = install_root() / INDEX
    if not isinstance(hub := _model_hub(), ImportError):
        hub.register_model_index(path, config_prefix=path.parent)
    index = load(str(path))
    index.build_models_with_collections()
    return {model.name: model for model in index.models}


def _model_hub() -> Any:
    try:
        return import_module('mmpretrain.apis').ModelHub
    except ImportError as error:
        return error


def find_model_config(name: str) -> Config:
    """Return a config of aft_mm by path or name, or of mmpretrain by name."""
    try:
        return read_config(name)
    except UserError as error:
        if name.endswith('.py'):
            raise
        if isinstance(hub := _model_hub(), ImportError):
            raise UserError(f'{error}, and mmpretrain cannot be imported: {hub}') from error
        try:
            return hub.get(name).config
        except ValueError:
            raise error from None


def list_models(pattern: str | None = None) -> list[str]:
    """Return the names of our models, those of their configs.

    Args:
        pattern: Shell pattern for the beginning of a name, such as ``'aft-conv-*_in1k'``.
    """
    return fnmatch.filter(sorted(register_models()), f'{pattern or ""}*')


def get_model(
    name: str,
    pretrained: str | os.PathLike[str] | bool | None = None,
    device: str | torch.device | None = None,
) -> nn.Module:
    """Build a model of any task by its name, in evaluation mode, also for mmpretrain's inferencers.

    Args:
        name: One of :func:`list_models`, or a part of it that no other name has.
        pretrained: Path or http address of a checkpoint, True for the released weights, else
            initial ones.

    Raises:
        UserError: As for :func:`load_model`, the name is unknown, or there are no released weights.
    """
    check_text('name', name)
    models = register_models()
    if name not in models:
        name = our_config(name).stem
    if name not in models:
        raise UserError(f'name must be one of list_models(), got {name!r}')
    if pretrained is True:
        weights = models[name].weights
        if not weights:
            released = [other for other, model in models.items() if model.weights]
            raise UserError(
                f'{name} has no released weights; models with weights: '
                f'{", ".join(released) or "none"}'
            )
        pretrained = str(weights)
    config = read_config(str(install_root() / models[name].config))
    if not pretrained:
        model: nn.Module = build_model(config).to(device or get_device()).eval()
    else:
        config, model = load_model(config, pretrained, device, trainable=True)
    # Read by mmpretrain's inferencers.
    model._config, model._dataset_meta, model._metainfo = config, model.dataset_meta, models[name]
    return model
