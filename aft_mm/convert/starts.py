"""The trained backbone from which a training on own data starts."""

import os
from collections.abc import Callable
from functools import partial
from math import isqrt
from pathlib import Path
from pprint import pformat
from typing import Any, NamedTuple

from torch import nn

from aft_mm.checkpoint import load_from_local
from aft_mm.config.finding import check_checkpoint
from aft_mm.config.texts import Literal, entry, type_name
from aft_mm.errors import UserError
from aft_mm.models import AFTViT

from .packages import STARTS
from .vit_weights import save_converted

LAYERS = 4  # at the end of the backbone, which the head of an image-folder reads
# The whole image, but for the ends of its longer side.
PHOTOS = """
# Only the head is trained, on the features of {start}.
size = {size}
model['backbone'] = {backbone}
model['backbone']['img_size'] = {img_size}
model['neck'] = dict(in_channels={dims})
model['head']['in_channels'] = {read}
data_preprocessor |= {pixels}

pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='ResizeEdge', scale=size, edge='short', backend='pillow', interpolation='bicubic'),
    dict(type='CenterCrop', crop_size=size),
    dict(type='PackInputs'),
]
train_dataloader['dataset']['pipeline'] = pipeline
val_dataloader['dataset']['pipeline'] = pipeline
test_dataloader['dataset']['pipeline'] = pipeline
"""
DENSE = """
# The layers of {start} are frozen, those after it are trained.
model['backbone'] = {backbone}
model['data_preprocessor'] = dict(preprocessor={pixels})
"""
BOXES = f"""{DENSE}
model['neck'] = dict(in_channels={{dims}}, in_stride={{patch}}, strides={{strides}}[:3])
model['bbox_head']['anchor_generator'] = dict(strides={{strides}})
"""
MASKS = f"""{DENSE}
model['neck'] = dict(
    type='aft_mm.SimpleFeaturePyramid',
    in_channels={{dims}},
    out_channels=96,
    in_stride={{patch}},
    strides={{strides}}[:1],
)
model |= dict(decode_head=dict(in_index=0, **head), auxiliary_head=None)
train_cfg = dict(max_iters=600, val_interval=150)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=False, begin=50, end=600),
]
"""
SPEED = 40e9  # multiply-adds of a backbone in a second of one CPU thread
LINES = {'image-folder': PHOTOS, 'coco': BOXES, 'voc': BOXES, 'masks': MASKS}


class Start(NamedTuple):
    text: Callable[..., str]  #: Part of the config; that of classes takes another `size` of images.
    size: int
    network: AFTViT
    weights: Path

    def seconds(self, pixels: int) -> float:
        """Return about how long the backbone needs for an image on one CPU thread."""
        tokens = pixels / self.network.patch_embed.patch_size**2
        linear = [x for x in self.network.modules() if isinstance(x, nn.Linear | nn.Conv2d)]
        pairs = 2 * self.network.embed_dims * len(self.network.layers)  # of softmax attention
        return tokens * (sum(x.weight.numel() for x in linear) + pairs * tokens) / SPEED


def read_start(start: str, out: Path, kind: str) -> Start:
    """Return the part of a config `out` whose backbone is that of a start, frozen.

    The weights of a package are written next to the config.

    Args:
        start: A name of STARTS, or a checkpoint of aft_mm.
        kind: Of the data, a key of LINES.

    Raises:
        UserError: The start is missing, damaged, or has no backbone of aft_mm for colour images.
    """
    path = Path(start)
    if start in STARTS:
        path = out.with_name(f'{out.stem}_{start}.pth')
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            save_converted(*STARTS[start], path)
    check_checkpoint(str(path))
    checkpoint = load_from_local(str(path), map_location='cpu')
    text = str((checkpoint.get('meta') or {}).get('cfg', ''))
    model = entry(text, 'model')
    backbone = _backbone(model, start)
    dims, depth, _ = AFTViT.parse_arch(backbone.get('arch', 'tiny'))
    layers = range(max(0, depth - LAYERS), depth)
    backbone['frozen_stages'] = depth
    if kind == 'image-folder':
        backbone |= dict(
            out_indices=tuple(layers),
            out_type='cls_token' if backbone.get('with_cls_token') else 'avg_featmap',
        )
    else:
        backbone |= dict(out_type='featmap', with_mask_channel=True)
    weights = {
        name.removeprefix('backbone.'): tensor
        for name, tensor in checkpoint.get('state_dict', {}).items()
        if name.startswith('backbone.')
    }
    network = _network(backbone, weights, start)
    patch = network.patch_embed.patch_size
    size = backbone.get('img_size', 224)
    if kind == 'image-folder':
        backbone.pop('img_size', None)
    elif network.pos_embed and len(weights['pos_embed.weight']) != network.pos_embed.num_tokens:
        # Positions are interpolated once, to the grid of an image, and saved as they are.
        size = backbone['img_size'] = isqrt(len(weights['pos_embed.weight'])) * patch
    pretrained = dict(
        type='Pretrained', checkpoint=Literal(os.path.abspath(path)), prefix='backbone'
    )
    settings = dict(_delete_=True, type='aft_mm.AFTViT', **backbone, init_cfg=pretrained)
    finest = finest_stride(patch)
    pixels = _pixels(model.get('data_preprocessor') or entry(text, 'data_preprocessor'), kind)
    if kind in ('coco', 'voc'):
        pixels['pad_size_divisor'] = 4 * finest
    side = size if isinstance(size, int) else min(size)
    lines = partial(
        LINES[kind].format,
        start=repr(Literal(start)),
        backbone=pformat(settings, width=96, sort_dicts=False),
        dims=dims,
        read=dims * len(layers),
        pixels=pixels,
        size=side,
        img_size='size' if isinstance(size, int) else size,
        patch=patch,
        strides=[finest << level for level in range(4)],
    )
    return Start(lines, side, network, path)


def _backbone(model: dict[str, Any], start: str) -> dict[str, Any]:
    """Return the settings of the backbone that a frozen one needs."""
    backbone = model.get('backbone') or {}
    if type_name(backbone.get('type')) != 'AFTViT' or backbone.get('in_channels', 3) != 3:
        raise UserError(
            f'--start must be {" or ".join(STARTS)}, or a checkpoint with the config of a model whose '
            f'backbone is aft_mm.AFTViT for 3 channels, got {start!r}; `aft_mm convert vit` converts '
            'others'
        )
    unused = 'type', 'out_indices', 'init_cfg', 'with_mask_channel', 'drop_path_rate'
    return {name: value for name, value in backbone.items() if name not in unused}


def _network(settings: dict[str, Any], weights: dict[str, Any], start: str) -> AFTViT:
    network = AFTViT(**settings)
    try:
        network.load_state_dict(weights)
    except (RuntimeError, ValueError) as error:
        raise UserError(f'--start {start!r}: {error}') from error
    for name, tensor in network.state_dict().items():
        # The conversion has checked those of a package.
        if start not in STARTS and not tensor.isfinite().all():
            raise UserError(f'--start {start!r} must have finite weights, got NaN or inf in {name}')
    return network


def _pixels(preprocessor: dict[str, Any], kind: str) -> dict[str, Any]:
    given = preprocessor.get('preprocessor', preprocessor)  # of a MaskedDataPreprocessor
    pixels = {name: given[name] for name in ('mean', 'std') if name in given}
    is_rgb = given.get('to_rgb') or given.get('bgr_to_rgb') or False
    return pixels | {'to_rgb' if kind == 'image-folder' else 'bgr_to_rgb': is_rgb}


def finest_stride(patch: int) -> int:
    """Return the finest stride [px] of a pyramid on a map of one place per patch, 6 to 11 if possible."""
    while patch >= 12 and patch % 2 == 0:
        patch //= 2
    while patch < 6:
        patch *= 2
    return patch
