"""Image networks of every kind for the tools that look into them: ours, mmpretrain's and timm's."""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from mmengine.config import Config
from PIL import Image
from torch import Tensor, nn

from aft_mm.config.reading import check_checkpoint, read_config
from aft_mm.errors import UserError

from .inputs import build_dataset, load_images, network_inputs, read_image, spread_samples
from .loading import load_model

#: What a network is called that timm makes.
TIMM = 'timm:'
#: The children of a backbone that hold its layers one after another, by name.
STACKS = ('layers', 'blocks', 'stages', 'features')


class Network(NamedTuple):
    """An image network in evaluation mode.

    ``run`` takes normalised images [B, C, H, W] through ``backbone``, without the head of a
    classifier of mmpretrain; ``config`` is None for one of timm.
    """

    model: nn.Module
    backbone: nn.Module
    run: Callable[[Tensor], Any]
    config: Config | None
    in_channels: int
    image_size: tuple[int, int]
    num_prefix_tokens: int


def load_network(name: str, checkpoint: str | os.PathLike | None = None) -> Network:
    """A network by the path of a config, by mmpretrain's name of it, or by ``timm:`` and timm's.

    Without a checkpoint its weights are random, seed 0. Nothing is downloaded.

    Raises:
        UserError: there is no such config or name, or the checkpoint is of another network.
    """
    if name.startswith(TIMM):
        return _timm_network(name.removeprefix(TIMM), checkpoint)
    config = read_config(name) if name.endswith('.py') else _config_of_mmpretrain(name)
    if not (config.get('model') or {}).get('backbone'):
        raise UserError(f'{name} has no model with a backbone, which the images would go through')
    _, model = load_model(config, checkpoint, 'cpu')
    backbone = model.backbone
    run: Callable[[Tensor], Any] = backbone
    if getattr(backbone, 'with_mask_channel', False):

        def with_mask(images: Tensor) -> Any:
            missing = backbone.in_channels + 1 - images.shape[1]  # a preprocessor has added it
            return backbone(F.pad(images, (0, 0, 0, 0, 0, missing), value=1.0))

        run = with_mask
    size = config.model.backbone.get('img_size', 224)
    return Network(
        model=model,
        backbone=backbone,
        run=run,
        config=config,
        in_channels=config.model.backbone.get('in_channels', 3),
        image_size=(size, size) if isinstance(size, int) else tuple(size),
        num_prefix_tokens=num_prefix_tokens(backbone),
    )


def num_prefix_tokens(backbone: nn.Module) -> int:
    """Class tokens and the like, as mmpretrain (``num_extra_tokens``) or timm and ours tell."""
    for name in ('num_extra_tokens', 'num_prefix_tokens'):
        if hasattr(backbone, name):
            return int(getattr(backbone, name))
    return 0


def layers_of(backbone: nn.Module) -> list[str]:
    """Names of the layers of a backbone: the items of its longest stack, or of ``layer1`` to 4.

    Raises:
        UserError: it has neither, so that names must be given.
    """
    stacks = {
        name: child
        for name, child in backbone.named_children()
        if name in STACKS and isinstance(child, nn.ModuleList | nn.Sequential)
    }
    if stacks:
        name = max(stacks, key=lambda name: len(stacks[name]))
        return [f'{name}.{index}' for index in range(len(stacks[name]))]
    numbered = [
        name
        for name, _ in backbone.named_children()
        if name.startswith('layer') and name[5:].isdecimal()
    ]
    if numbered:
        return numbered
    children = ', '.join(name for name, _ in backbone.named_children())
    raise UserError(
        f'the layers of {type(backbone).__name__} must be named by --layers; its parts '
        f'are {children}'
    )


def modules_named(backbone: nn.Module, names: list[str]) -> dict[str, nn.Module]:
    """Parts of a backbone by name.

    Raises:
        UserError: it has no such part.
    """
    parts = dict(backbone.named_modules())
    for name in names:
        if name not in parts or not name:
            raise UserError(
                f'{type(backbone).__name__} has no layer {name!r}; it has '
                f'{", ".join(layer for layer in list(parts)[1:12])}, …'
            )
    return {name: parts[name] for name in names}


def noise_images(network: Network, count: int, size: tuple[int, int] | None = None) -> Tensor:
    """Normalised images of nothing, N(0, 1) per pixel with seed 0: [count, C, H, W]."""
    shape = (count, network.in_channels, *(size or network.image_size))
    return torch.from_numpy(np.random.default_rng(0).standard_normal(shape, np.float32))


def batches_for(
    network: Network, paths: Sequence[str | os.PathLike] | None, num: int, batch_size: int
) -> list[Tensor]:
    """Normalised images [B, C, H, W]: of files, else of the test split of a network's config.

    Images of timm's networks are resized to its size, stretched, and normalised as it says.

    Raises:
        UserError: a file is no image, or the network is of timm and there is no file.
    """
    if network.config is None:
        if not paths:
            raise UserError('a network of timm has no data set: give --images')
        batch = torch.stack([_timm_image(network, path) for path in paths])
        return list(batch.split(batch_size))
    samples = (
        load_images(network.config, paths)
        if paths
        else spread_samples(build_dataset(network.config), num)
    )
    return [
        network_inputs(network.config, samples[first : first + batch_size])
        for first in range(0, len(samples), batch_size)
    ]


def _timm_image(network: Network, path: str | os.PathLike) -> Tensor:
    image, _ = read_image(path)
    height, width = network.image_size
    resized = Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(resized)).permute(2, 0, 1) / 255
    settings: Any = network.model.pretrained_cfg
    mean, std = (torch.tensor(settings[key]).view(-1, 1, 1) for key in ('mean', 'std'))
    return (pixels - mean) / std


def _config_of_mmpretrain(name: str) -> Config:
    from mmpretrain.apis.model import ModelHub

    try:
        return ModelHub.get(name).config
    except ValueError as error:
        raise UserError(
            f'{name!r} is neither the path of a config (.py) nor the name of a model '
            f'of mmpretrain, nor timm:NAME'
        ) from error


def _timm_network(name: str, checkpoint: str | os.PathLike | None) -> Network:
    try:
        import timm
    except ImportError as error:
        raise UserError('networks of timm need it: pip install timm') from error
    if name not in timm.list_models():
        raise UserError(f'timm has no model {name!r}')
    path = None if checkpoint is None else os.fspath(checkpoint)
    check_checkpoint(path)
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False)
    if path is not None:
        try:
            weights = timm.models.load_state_dict(path, use_ema=False, weights_only=True)
            model.load_state_dict(weights)
        except RuntimeError as error:
            raise UserError(f'checkpoint {path!r} does not fit {TIMM}{name}') from error
    channels, *size = model.pretrained_cfg.get('input_size', (3, 224, 224))
    return Network(
        model=model.eval().requires_grad_(False),
        backbone=model,
        run=model.forward_features,
        config=None,
        in_channels=channels,
        image_size=tuple(size),
        num_prefix_tokens=num_prefix_tokens(model),
    )
