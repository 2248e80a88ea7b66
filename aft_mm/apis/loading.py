"""Load a trained model from its config and checkpoint."""

import os
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.registry import MODELS, DefaultScope
from mmengine.runner import CheckpointLoader
from torch import nn

import aft_mm.registry  # noqa: F401, the safe loading of checkpoints
from aft_mm.checkpoint import load_weights
from aft_mm.config.finding import check_checkpoint
from aft_mm.config.reading import import_scope, read_config
from aft_mm.errors import UserError

FilePath: TypeAlias = str | os.PathLike[str]
ConfigSource: TypeAlias = FilePath | Config
Device: TypeAlias = str | torch.device | None

#: Inferencer for each entry of a config; the first found decides.
ENTRIES = {
    'Translator': 'subwords',
    'SpeechRecognizer': 'units',
    'SuperResolver': 'source_shape',
    'PointCloudGenerator': 'point_cloud',
    'ImageGenerator': 'image_shape',
}

#: Names of mmpretrain's classifier in configs.
CLASSIFIERS = ('ImageClassifier', 'mmpretrain.ImageClassifier')


def task_of(config: Config) -> str:
    """Return the name of the inferencer for the model of a config, TextGenerator by default."""
    return next((name for name, entry in ENTRIES.items() if entry in config), 'TextGenerator')


def as_list(given: Any, *kinds: type) -> list[Any]:
    """Return several inputs as a list, and one, of these types or not iterable, in a list."""
    return list(given) if isinstance(given, Iterable) and not isinstance(given, kinds) else [given]


def check_options(options: dict[str, Any], *names: str) -> None:
    """Raise a :class:`UserError` for options that the inferencer sets itself."""
    for name in names or ('length', 'prompts', 'batch_size', 'source'):
        if name in options:
            raise UserError(f'{name} must not be an option here, got {options[name]!r:.80}')


def check_draws(config: Config) -> None:
    if 'decoder' not in (config.get('model') or {}):
        raise UserError(f'{config.filename} has no autoregressive model (one with a decoder)')


def check_task(config: Config, name: str) -> None:
    """Raise a :class:`UserError` unless the inferencer ``name`` supports the model of a config."""
    if name == 'ImageClassifier':
        kind = (config.get('model') or {}).get('type')
        if kind not in CLASSIFIERS:
            raise UserError(
                f'{config.filename} must be the config of an image classifier, got a model of '
                f'type {kind!r}'
            )
        return
    task = task_of(config)
    if name != 'SpeechRecognizer':
        check_draws(config)
    elif task not in ENTRIES:
        raise UserError(f'{config.filename} must have {ENTRIES[name]} for {name}, got none')
    if task != name:
        reason = (
            f'has {ENTRIES[task]}'
            if task in ENTRIES
            else f'has none of {", ".join(ENTRIES.values())}'
        )
        raise UserError(
            f'{config.filename} is a config for {task}, not for {name}, because it {reason}'
        )


def build_model(config: Config) -> Any:
    import_scope(config)
    settings = config.model.copy()
    if config.get('data_preprocessor') is not None:
        settings.setdefault('data_preprocessor', config.data_preprocessor)
    with DefaultScope.overwrite_default_scope(config.get('default_scope', 'mmengine')):
        model = MODELS.build(settings)
    model.dataset_meta = {}
    return model


def load_trained(model: Any, config: Config, checkpoint: FilePath) -> None:
    """Load the weights and ``dataset_meta`` of a checkpoint into the model of a config."""
    weights = CheckpointLoader.load_checkpoint(os.fspath(checkpoint), 'cpu', 'silent')
    load_weights(model, weights, name=str(config.filename))
    model.dataset_meta = (weights.get('meta') or {}).get('dataset_meta') or {}


def load_model(
    config: ConfigSource,
    checkpoint: FilePath | nn.Module | None,
    device: Device = None,
    task: str | None = None,
    trainable: bool = False,
) -> tuple[Config, Any]:
    """Build the model of a config and load a checkpoint into it, safely and strictly.

    Args:
        checkpoint: Path or http address; None for random weights with seed 0; a loaded model is
            returned as it is.
        device: By default an accelerator if there is one.
        task: Name of the inferencer that will use the model; None accepts any model.
        trainable: Keep the gradients of the parameters.

    Returns:
        The config and the model, in evaluation mode, without gradients unless `trainable`, with the
        ``dataset_meta`` of the checkpoint.

    Raises:
        UserError: A file or library is missing, or config and checkpoint do not fit.
        pickle.UnpicklingError: The checkpoint is damaged, or holds more than training state.
    """
    if not isinstance(config, Config):
        config = read_config(os.fspath(config))
    import_scope(config)
    if task is not None:
        check_task(config, task)
    if isinstance(checkpoint, nn.Module):
        return config, checkpoint
    if checkpoint is None:
        torch.manual_seed(0)
    else:
        check_checkpoint(os.fspath(checkpoint))
    device = device or get_device()
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # by torch without CUDA
        raise UserError(
            f'device must be one of this machine, such as cpu, got {device!r}'
        ) from error
    model = build_model(config)
    if checkpoint is not None:
        load_trained(model, config, checkpoint)
    model = model.to(device).eval()
    return config, model if trainable else model.requires_grad_(False)
