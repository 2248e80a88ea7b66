"""Image networks of aft_mm, mmpretrain and timm, their inputs, and what their layers compute."""

import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from mmengine.registry import DATASETS, DefaultScope
from PIL import Image
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from aft_mm.apis import load_model
from aft_mm.apis.images import label_rule, loaded, loads_file, of_images, takes_bgr
from aft_mm.apis.loading import find_model_config, pipeline_of
from aft_mm.checks import check_int, refuse
from aft_mm.config.finding import check_checkpoint
from aft_mm.config.reading import check_data
from aft_mm.engine.runner import bases_of
from aft_mm.errors import UserError
from aft_mm.hosts import quiet_pycocotools
from aft_mm.images import read_image, read_rgb

from ..analysis import AtMost


def build_dataset(config: Config, split: str = 'test') -> Any:
    if not config.get(f'{split}_dataloader'):
        raise UserError(f'{config.filename} has no {split}_dataloader')
    check_data(config, split)
    if config.get('default_scope') == 'mmdet':
        quiet_pycocotools()
    with DefaultScope.overwrite_default_scope(config.get('default_scope', 'mmengine')):
        try:
            return DATASETS.build(config[f'{split}_dataloader'].dataset)
        except ValueError as error:
            if 'need at least one array' not in str(error):  # raised by mmengine for no samples
                raise
            raise UserError(
                f'{split}_dataloader.dataset of {config.filename} is empty: no file has the '
                'content that it needs, such as objects of its classes'
            ) from error


def class_names(dataset: Any, count: int, model: Any = None) -> list[str]:
    """Return the class names of a checkpoint or dataset, or numbers if there are not ``count``."""
    names = (getattr(model, 'dataset_meta', None) or {}).get('classes')
    names = names or (getattr(dataset, 'metainfo', None) or {}).get('classes') or ()
    names = [names] if isinstance(names, str) else list(names)
    return list(map(str, names if len(names) == count else range(count)))


def spread_samples(dataset: Any, num: int) -> list[dict]:
    """Return ``num`` evenly spaced samples of a dataset, since many are sorted by class."""
    check_int('--num', num, 1)
    if isinstance(num, AtMost):
        num = min(num, len(dataset))
    if num > len(dataset):
        raise UserError(
            f'--num must be at most {len(dataset)}, the samples of the dataset, got {num}'
        )
    return [dataset[int(index)] for index in np.linspace(0, len(dataset) - 1, num).round()]


def load_images(config: Config, paths: Sequence[str | os.PathLike]) -> list[dict]:
    listed = of_images(pipeline_of(config))
    with DefaultScope.overwrite_default_scope(config.get('default_scope', 'mmengine')):
        steps = Compose([step for step in listed if not loads_file(step)])
    samples = []
    for path in [os.fspath(path) for path in paths]:
        image, _ = read_image(path, config.model.backbone.get('in_channels', 3))
        samples.append(steps(dict(loaded(image, takes_bgr(config)), img_path=path)))
    return samples


def samples_for(config: Config, paths: Sequence[str | os.PathLike] | None, num: int) -> list[dict]:
    return load_images(config, paths) if paths else spread_samples(build_dataset(config), num)


def shown_image(config: Config, sample: dict) -> np.ndarray:
    """Return the image of a packed sample before normalisation: RGB uint8 [H, W, 3]."""
    image = sample['inputs'].numpy().transpose(1, 2, 0)
    if image.shape[-1] == 1:
        return image.repeat(3, axis=-1)
    return np.ascontiguousarray(image[..., ::-1]) if takes_bgr(config) else image


def network_inputs(model: Any, samples: Sequence[dict]) -> Tensor:
    sizes = {tuple(sample['inputs'].shape) for sample in samples}
    if len(sizes) > 1:
        raise UserError(f'images must have the same size, got {sorted(sizes)}; give one at a time')
    with torch.no_grad():
        return model.data_preprocessor(pseudo_collate(list(samples)), False)['inputs']


def batches_of(model: Any, samples: Sequence[dict], batch_size: int) -> Iterator[Tensor]:
    for first in range(0, len(samples), batch_size):
        yield network_inputs(model, samples[first : first + batch_size])


TIMM = 'timm:'
STACKS = ('layers', 'blocks', 'stages', 'features')


class Network(NamedTuple):
    """An image network in evaluation mode; ``config`` is None for networks of timm.

    ``run`` applies ``backbone`` to normalised images [B, C, H, W].
    """

    model: Any
    backbone: Any
    run: Callable[[Tensor], Any]
    config: Config | None
    in_channels: int
    image_size: tuple[int, int]
    num_prefix_tokens: int


def load_network(name: str, checkpoint: str | os.PathLike | None = None) -> Network:
    """Load a network by the path or name of its config, or ``timm:NAME``; nothing is downloaded."""
    if name.startswith(TIMM):
        return _timm_network(name.removeprefix(TIMM), checkpoint)
    config = find_model_config(name)
    if not (config.get('model') or {}).get('backbone'):
        raise UserError(f'{name} must be the config of a model with a backbone, got one without')
    _, model = load_model(config, checkpoint, 'cpu')
    backbone = model.backbone
    run: Callable[[Tensor], Any] = backbone
    if getattr(backbone, 'with_mask_channel', False):

        def with_mask(images: Tensor) -> Any:
            missing = backbone.in_channels + 1 - images.shape[1]  # else added by the preprocessor
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


def load_classifier(name: str, checkpoint: str | os.PathLike) -> Network:
    network = load_network(name, checkpoint)
    check_classifier(network, name)
    return network


def check_classifier(network: Network, name: str) -> None:
    if network.config is None or not hasattr(network.model, 'head'):
        raise UserError(
            f'{name} is not a classifier of mmpretrain; of a detector or segmentor `aft_mm test` '
            'names the weakest classes, and `aft_mm predict` makes pictures'
        )


def has_one_label(model: Any) -> bool:
    """Return whether a classifier gives an image one class."""
    return not label_rule(model) and 'MultiTaskHead' not in bases_of(getattr(model, 'head', None))


def check_one_label(network: Network, name: str) -> None:
    check_classifier(network, name)
    if not has_one_label(network.model):
        kind = type(network.model.head).__name__
        raise UserError(
            f'{name} must be a classifier with one label per image, got one with {kind}'
        )


def label_of(sample: dict) -> int:
    """Return the class of a packed sample."""
    labels = sample['data_samples'].gt_label
    if len(labels) != 1:
        path = sample['data_samples'].get('img_path')
        raise UserError(f'the images must have one class each, got {len(labels)} of {path!r}')
    return int(labels)


def num_prefix_tokens(backbone: nn.Module) -> int:
    for name in ('num_extra_tokens', 'num_prefix_tokens'):
        if hasattr(backbone, name):
            return int(getattr(backbone, name))
    return 0


def layers_of(backbone: nn.Module) -> list[str]:
    """Return the names of the layers: items of the longest stack, or ``layer1``, ..."""
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
        f'--layers must name the layers of {type(backbone).__name__}; its children are {children}'
    )


def modules_named(backbone: nn.Module, names: list[str]) -> dict[str, nn.Module]:
    parts = dict(backbone.named_modules())
    for name in names:
        if name not in parts or not name:
            raise UserError(
                f'{type(backbone).__name__} has no layer {name!r}; it has '
                f'{", ".join(layer for layer in list(parts)[1:12])}, …'
            )
    return {name: parts[name] for name in names}


def noise_images(network: Network, count: int, size: tuple[int, int] | None = None) -> Tensor:
    shape = (count, network.in_channels, *(size or network.image_size))
    return torch.from_numpy(np.random.default_rng(0).standard_normal(shape, np.float32))


def batches_for(
    network: Network, paths: Sequence[str | os.PathLike] | None, num: int, batch_size: int
) -> list[Tensor]:
    """Return normalised images [B, C, H, W] from files or from the test split."""
    if network.config is None:
        if not paths:
            raise UserError('images must be given for networks of timm, which have no dataset')
        batch = torch.stack([_timm_image(network, path) for path in paths])
        return list(batch.split(batch_size))
    samples = samples_for(network.config, paths, num)
    return list(batches_of(network.model, samples, batch_size))


def _timm_image(network: Network, path: str | os.PathLike) -> Tensor:
    image, _ = read_rgb(path)
    height, width = network.image_size
    resized = Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(resized)).permute(2, 0, 1) / 255
    settings: Any = network.model.pretrained_cfg
    mean, std = (torch.tensor(settings[key]).view(-1, 1, 1) for key in ('mean', 'std'))
    return (pixels - mean) / std


def _timm_network(name: str, checkpoint: str | os.PathLike | None) -> Network:
    try:
        import timm
    except ImportError as error:
        raise UserError('networks of timm need timm: pip install timm') from error
    if name not in timm.list_models():
        raise UserError(f'timm has no model {name!r}')
    path = None if checkpoint is None else os.fspath(checkpoint)
    check_checkpoint(path)
    torch.manual_seed(0)
    model: Any = timm.create_model(name, pretrained=False)
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


def mixers_with_keys(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, 'position_bias') and isinstance(getattr(module, 'key', None), nn.Linear)
    }


def by_layer(mixers: Mapping[str, Any]) -> dict[int, Any]:
    """Return mixers by the number of their block, or by their order if they are not in one stack."""
    found = [re.search(r'^(.*)\.(\d+)\.token_mixer$', name) for name in mixers]
    numbers = [int(match[2]) for match in found if match]
    stacks = {match[1] for match in found if match}
    if sorted(set(numbers)) != numbers or len(numbers) != len(mixers) or len(stacks) > 1:
        numbers = list(range(len(mixers)))
    return dict(zip(numbers, mixers.values(), strict=True))


@contextmanager
def record_outputs(modules: dict[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: outputs.__setitem__(name, output)

    handles = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


class _AttentionMode(TorchFunctionMode):
    def __init__(self, take: Callable[[Tensor], Any], inside: bool) -> None:
        super().__init__()
        self.take, self.inside = take, inside

    def set_inside(self, inside: bool) -> Callable[..., None]:
        return lambda *call: setattr(self, 'inside', inside)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside and func is F.scaled_dot_product_attention:
            self.take(attention_probabilities(*args, **kwargs))
        return func(*args, **kwargs)


@contextmanager
def record_attention(
    take: Callable[[Tensor], Any], modules: Collection[nn.Module] = ()
) -> Iterator[None]:
    """Pass the probabilities ``[B, h, T, S]`` of each attention inside the block to ``take``.

    It sees torch's ``scaled_dot_product_attention`` only, and of given modules no other.
    """
    mode = _AttentionMode(take, inside=not modules)
    handles = [module.register_forward_pre_hook(mode.set_inside(True)) for module in modules]
    handles += [module.register_forward_hook(mode.set_inside(False)) for module in modules]
    try:
        with mode:
            yield
    finally:
        for handle in handles:
            handle.remove()


def attention_probabilities(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute ``softmax(q kᵀ · scale)`` [..., T, S] of torch's attention before dropout."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    logits = (query @ key.mT).float() * (scale or 1 / math.sqrt(query.shape[-1]))
    if is_causal:
        attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
    if attn_mask is not None:
        logits = (
            logits.masked_fill(~attn_mask, -torch.inf)
            if attn_mask.dtype == torch.bool
            else logits + attn_mask
        )
    return logits.softmax(-1)


def grid_of(num_tokens: int, image_size: Sequence[int]) -> tuple[int, int] | None:
    """Return rows and columns of square patches that cover an image (H, W), or None."""
    grids = (
        (rows, num_tokens // rows) for rows in range(1, num_tokens + 1) if num_tokens % rows == 0
    )
    return next((grid for grid in grids if _fits(grid, image_size)), None)


def as_map(output: Any, image_size: Sequence[int], num_prefix_tokens: int = 0) -> Tensor:
    """Convert the output of a layer to a map [B, D, H', W'] over images of ``image_size``."""
    while isinstance(output, Sequence) and len(output):
        output = output[0]
    if isinstance(output, Tensor) and output.dim() == 4:
        last = _fits(output.shape[1:3], image_size) and not _fits(output.shape[2:], image_size)
        return output.permute(0, 3, 1, 2) if last else output
    if isinstance(output, Tensor) and output.dim() == 3:
        grid = grid_of(output.shape[1] - num_prefix_tokens, image_size)
        if grid is not None:
            return output[:, num_prefix_tokens:].unflatten(1, grid).permute(0, 3, 1, 2)
    refuse(
        'the output of the layer',
        'a map [B, D, H, W] or tokens [B, T, D] that cover images of '
        f'{tuple(image_size)} pixels after {num_prefix_tokens} prefix tokens',
        output,
    )


def _fits(grid: Sequence[int], image_size: Sequence[int]) -> bool:
    cells = {-(-pixels // count) for pixels, count in zip(image_size, grid, strict=True)}
    return any(
        all(-(-pixels // cell) == count for pixels, count in zip(image_size, grid, strict=True))
        for cell in cells
    )
