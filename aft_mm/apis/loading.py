"""Load a trained model from its config and checkpoint, or build one by its name."""

import fnmatch
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from io import IOBase
from typing import Any, TypeAlias

import numpy as np
import PIL.Image
import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.registry import MODELS, DefaultScope
from mmengine.runner import CheckpointLoader
from modelindex.load_model_index import load
from modelindex.models.Model import Model
from torch import nn

import aft_mm.registry  # noqa: F401, the safe loading of checkpoints
from aft_mm.checkpoint import CONFIG_TEXT, load_weights
from aft_mm.checks import check_path, check_text, described, refuse
from aft_mm.config.finding import INDEX, check_checkpoint, install_root, our_config
from aft_mm.config.reading import import_scope, read_config
from aft_mm.config.texts import type_name
from aft_mm.config.trained import warn_of_other_options
from aft_mm.errors import UserError
from aft_mm.models import generate
from aft_mm.openmmlab import warn

FilePath: TypeAlias = str | os.PathLike[str]
ConfigSource: TypeAlias = FilePath | Config
Checkpoint: TypeAlias = FilePath | nn.Module | None
Device: TypeAlias = str | torch.device | None
ImageSource: TypeAlias = FilePath | np.ndarray | PIL.Image.Image
ImageSources: TypeAlias = ImageSource | Sequence[ImageSource]

#: Iterable inputs that are one.
ONE = (str, bytes, bytearray, os.PathLike, torch.Tensor, IOBase, Mapping)

#: Options of generation that inferencers set or cannot use.
TAKEN = ('source', 'end_token')

#: Inferencer for each entry of a config; the first found decides.
ENTRIES = {
    'Translator': 'subwords',
    'SpeechRecognizer': 'units',
    'SuperResolver': 'source_shape',
    'PointCloudGenerator': 'point_cloud',
    'ImageGenerator': 'image_shape',
}

#: Command for the models of an inferencer, and what follows config and checkpoint.
COMMANDS = {
    'Translator': ('translate', ''),
    'SpeechRecognizer': ('transcribe', 'FILE'),
    'SuperResolver': ('super-resolve', 'IN OUT.png'),
    'PointCloudGenerator': ('sample', '--out sample.ply'),
    'ImageGenerator': ('sample', '--out sample.png'),
    'TextGenerator': ('sample', '--out sample.txt'),
}


def is_classifier(config: Config) -> bool:
    return type_name((config.get('model') or {}).get('type')) == 'ImageClassifier'


def task_of(config: Config) -> str:
    """Return the name of the inferencer for the model of a config, TextGenerator by default."""
    return next((name for name, entry in ENTRIES.items() if entry in config), 'TextGenerator')


def as_list(given: Any) -> list[Any]:
    """Return several inputs as a list, and one in a list; only an array of texts or objects is several."""
    if isinstance(given, np.ndarray):
        is_one = given.dtype.kind not in 'OUT'
    else:
        is_one = isinstance(given, ONE) or not isinstance(given, Iterable)
    return [given] if is_one else list(given)


def check_options(
    options: dict[str, Any], taken: Sequence[str] = TAKEN, function: Callable[..., Any] = generate
) -> None:
    """Raise a :class:`UserError` for options that `function` lacks, or that the inferencer sets itself."""
    given = inspect.signature(function).parameters.values()
    known = [one.name for one in given if one.kind is one.KEYWORD_ONLY and one.name not in taken]
    for name, value in options.items():
        if name not in known:
            raise UserError(
                f'options must be among {", ".join(known)}, got {name}={described(value)}'
            )


def check_draws(config: Config) -> None:
    if 'decoder' not in (config.get('model') or {}):
        raise UserError(f'{config.filename} has no autoregressive model (one with a decoder)')


def check_task(config: Config, name: str) -> None:
    """Raise a :class:`UserError` unless the inferencer ``name`` supports the model of a config."""
    if name == 'ImageClassifier':
        if not is_classifier(config):
            kind = (config.get('model') or {}).get('type')
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
            f'{config.filename} is a config for {task} (`aft_mm {COMMANDS[task][0]}`), not for '
            f'{name}, because it {reason}'
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
    meta = weights.get('meta') or {}
    warn_of_other_options(config, meta.get(CONFIG_TEXT, ''))
    model.dataset_meta = meta.get('dataset_meta') or {}


def as_config(config: ConfigSource) -> Config:
    """Return a config, read if it is a path or name, with the library of its scope imported."""
    if not isinstance(config, Config):
        check_path('config', config)
        config = read_config(os.fspath(config))
    import_scope(config)
    return config


def pipeline_of(config: Config) -> Any:
    """Return the steps by which a test reads its data."""
    steps = ((config.get('test_dataloader') or {}).get('dataset') or {}).get('pipeline')
    if steps is None:
        raise UserError(f'{config.filename} must have a test_dataloader with a pipeline, got none')
    return steps


def usable_device(device: Device) -> Any:
    """Return the device, by default an accelerator if there is one."""
    device = device or get_device()
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:  # by torch without CUDA
        raise UserError(
            f'device must be one of this machine, such as cpu, got {device!r}'
        ) from error
    return device


def check_model(config: Config, model: Any) -> None:
    """Raise a :class:`UserError` unless the model has the type of the config's; complete it."""
    scope = config.get('default_scope', 'mmengine')
    kind = (config.get('model') or {}).get('type')
    with MODELS.switch_scope_and_registry(scope) as registry:
        kind = registry.get(kind) if isinstance(kind, str) else kind
    # Wrappers, such as those of torch.compile and adapters, pass test_step on.
    fits = not isinstance(kind, type) or any(isinstance(x, kind) for x in model.modules())
    if not fits or not hasattr(model, 'test_step'):
        raise UserError(
            f'checkpoint must be a path or a model of type {type_name(kind)}, as that of '
            f'{config.filename}, got {type(model).__name__}'
        )
    if not hasattr(model, 'dataset_meta'):
        model.dataset_meta = {}


def load_model(
    config: ConfigSource,
    checkpoint: Checkpoint,
    device: Device = None,
    task: str | None = None,
    trainable: bool = False,
) -> tuple[Config, Any]:
    """Build the model of a config and load a checkpoint into it, safely and strictly.

    Args:
        checkpoint: Path or http address; None for random weights with seed 0; a loaded model of the
            type in the config is returned as it is.
        device: By default an accelerator if there is one, and for a loaded model its own.
        task: Name of the inferencer that will use the model; None accepts any model.
        trainable: Keep the gradients of the parameters.

    Returns:
        The config and the model, in evaluation mode, without gradients unless `trainable`, with the
        ``dataset_meta`` of the checkpoint.

    Raises:
        UserError: A file or library is missing, or config and checkpoint do not fit.
        pickle.UnpicklingError: The checkpoint is damaged, or holds more than training state.
    """
    config = as_config(config)
    if task is not None:
        check_task(config, task)
    if isinstance(checkpoint, nn.Module):
        check_model(config, checkpoint)
        return config, checkpoint if device is None else checkpoint.to(usable_device(device))
    if checkpoint is not None:
        check_path('checkpoint', checkpoint)
        check_checkpoint(os.fspath(checkpoint))
    device = usable_device(device)
    # The user's random numbers stay the same, also on GPUs, which have no part in the weights.
    with torch.random.fork_rng(devices=[]), torch.device('cpu'):
        torch.default_generator.manual_seed(0)
        model = build_model(config)
    if checkpoint is not None:
        load_trained(model, config, checkpoint)
    elif task is not None:
        warn(f'{task} has a model with random weights, as checkpoint is None')
    model = model.to(device).eval()
    return config, model if trainable else model.requires_grad_(False)


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
    if not isinstance(pattern, str | None):
        refuse('pattern', 'a string or None', pattern)
    return fnmatch.filter(sorted(register_models()), f'{pattern or ""}*')


def get_model(
    name: str,
    pretrained: str | os.PathLike[str] | bool | None = None,
    device: str | torch.device | None = None,
) -> nn.Module:
    """Build a model of any task by its name, in evaluation mode, also for mmpretrain's inferencers.

    It takes what its ``data_preprocessor`` returns. A classifier takes ``(x − mean) / std`` of pixels x
    from 0 to 255, ``model.data_preprocessor(dict(inputs=x))['inputs']`` of x [B, C, H, W], in BGR if
    the preprocessor has ``to_rgb``.

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
    elif pretrained is not None and pretrained is not False:
        check_path('pretrained', pretrained)
    config = read_config(str(install_root() / models[name].config))
    if not pretrained:
        model: nn.Module = build_model(config).to(usable_device(device)).eval()
    else:
        config, model = load_model(config, pretrained, device, trainable=True)
    # Read by mmpretrain's inferencers.
    model._config, model._dataset_meta, model._metainfo = config, model.dataset_meta, models[name]
    return model
