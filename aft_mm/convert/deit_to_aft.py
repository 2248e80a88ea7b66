import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from torch import Tensor, nn

import aft_mm.registry  # noqa: F401, registers the backbone
from aft_mm.checkpoint import save_whole
from aft_mm.config.reading import read_config
from aft_mm.config.texts import type_name
from aft_mm.errors import CONFIG_ERRORS, UserError, user_errors
from aft_mm.layers.mixers.aft_conv import AFTConv
from aft_mm.models import AFTViT
from aft_mm.outputs import check_writable

from .vit_weights import Row, our_tensors, print_rows, read_tensors

# Tensors of a distilled DeiT, and those that AFT-conv does not have, in its own names.
DISTILLED = {
    'dist_token': 'AFT-conv averages the tokens',
    'head_dist': 'its input is the distillation token',
}
NO_PLACE = {
    'backbone.cls_token': 'AFT-conv averages the tokens',
    'backbone.pos_embed.weight': 'AFT-conv has a position bias instead',
}
OPTIONS = {'query': '--query', 'key': '--average-keys'}


def reason_against(name: str) -> str:
    return next((DISTILLED[part] for part in name.split('.') if part in DISTILLED), '')


def convert(
    path: str, backbone: AFTViT, head: nn.Module | None, query: bool, average_keys: bool
) -> tuple[dict[str, Tensor], list[Row]]:
    tensors = read_tensors(path)
    reasons = {name: reason_against(name) for name in tensors}
    rows = [Row(name, None, reason) for name, reason in reasons.items() if reason]
    known = {name: tensor for name, tensor in tensors.items() if not reasons[name]}
    converted, found = our_tensors(known, path)
    dims, heads = backbone.embed_dims, backbone.layers[0].token_mixer.num_heads
    given = len(converted['backbone.patch_embed.projection.weight'])
    if given != dims:
        raise UserError(
            f'{path!r} must have the {dims} channels of the model of --config, got {given}'
        )
    taken = dict(query=query, key=average_keys)
    for row in found:
        target = row.target or ''
        part = target.split('.')[-2:][0]
        reason = NO_PLACE.get(target, '')
        if not taken.get(part, True):
            reason = f'it has another meaning in AFT; {OPTIONS[part]} copies it'
        if head is None and target.startswith('head.'):
            reason = '--no-head omits it'
        if reason:
            del converted[target]
            row = Row(row.source, None, reason)
        elif part == 'key' and len(converted[target]) == dims:
            converted[target] = converted[target].unflatten(0, (heads, -1)).mean(1)
        rows.append(row)
    modules: dict[str, nn.Module] = dict(backbone=backbone)
    if head is not None:
        modules['head'] = head
    state = nn.ModuleDict(modules).state_dict()
    check_classes(converted, state, path)
    check_fit(converted, state, path)
    return {**state, **converted}, rows


def check_classes(converted: Mapping[str, Tensor], state: Mapping[str, Tensor], path: str) -> None:
    theirs, ours = (weights.get('head.fc.weight') for weights in (converted, state))
    if ours is None:
        return
    if theirs is None:
        raise UserError(f'{path!r} has no classifier; --no-head initialises a new one')
    if len(theirs) != len(ours):
        raise UserError(
            f'{path!r} must have {len(ours)} classes like the head of the config, got '
            f'{len(theirs)}; --no-head initialises a new classifier'
        )


def check_fit(converted: Mapping[str, Tensor], state: Mapping[str, Tensor], path: str) -> None:
    initialised = re.compile(r'pos_embed|token_mixer\.(query|key|pos_bias)')
    lacking = [name for name in state if name not in converted and not initialised.search(name)]
    for complaint, names in (
        ('does not have', [name for name in converted if name not in state]),
        ('also needs', lacking),
    ):
        if names:
            raise UserError(
                f'{path!r} does not fit the model of the config, which {complaint} '
                f'{names[0]}{f" and {len(names) - 1} more" if len(names) > 1 else ""}'
            )
    for name, tensor in converted.items():
        if tensor.shape != state[name].shape:
            raise UserError(
                f'{path!r} does not fit the model of the config: {name} is {list(tensor.shape)}, '
                f'but {list(state[name].shape)} there'
            )


def build_backbone(config: Config, query: bool) -> AFTViT:
    settings = config.model.get('backbone', {})
    if type_name(settings.get('type')) != 'AFTViT':
        raise UserError(
            f'the backbone of --config must be aft_mm.AFTViT, got {settings.get("type")}'
        )
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope(config.get('default_scope', 'mmengine')):
        backbone = MODELS.build(settings)
    mixers: list[Any] = [layer.token_mixer for layer in backbone.layers]
    for mixer in mixers:
        if type(mixer) is not AFTConv:
            raise UserError(
                f'the token mixer of --config must be aft_mm.AFTConv, got {type(mixer).__name__}'
            )
        if query and mixer.query is None:
            raise UserError('--query needs a --config whose mixer has a query')
    if len(heads := {mixer.num_heads for mixer in mixers}) > 1:
        raise UserError(f'the mixers of --config must have as many heads each, got {sorted(heads)}')
    return backbone


def build_head(config: Config) -> nn.Module:
    settings = config.model.get('head') or {}
    with DefaultScope.overwrite_default_scope(config.get('default_scope', 'mmengine')):
        head = MODELS.build(settings) if settings else nn.Identity()
    if head.state_dict().keys() != {'fc.weight', 'fc.bias'}:
        raise UserError(
            'the head of --config must be a linear layer such as LinearClsHead, got '
            f'{settings.get("type")}; --no-head omits the classifier'
        )
    return head


def run(args: argparse.Namespace) -> None:
    with user_errors(*CONFIG_ERRORS):
        if Path(args.dst).exists():
            raise UserError(f'{args.dst!r} exists already and was not changed')
        check_writable('DST.pth', [args.dst])
        config = read_config(args.config)
        backbone = build_backbone(config, args.query)
        head = build_head(config) if args.head else None
        state, rows = convert(args.src, backbone, head, args.query, args.average_keys)
        meta = dict(experiment_name=f'{Path(args.src).name} converted for {Path(args.config).stem}')
        weights = {name: tensor.contiguous() for name, tensor in state.items()}
        save_whole(dict(meta=meta, state_dict=weights), args.dst)
    print_rows(rows, state)
    print(f'written to {args.dst}')
