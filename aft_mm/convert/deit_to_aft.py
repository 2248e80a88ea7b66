import argparse
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import aft_mm.registry  # noqa: F401, registers the backbone
from aft_mm.checkpoint import load_from_local
from aft_mm.config.finding import check_checkpoint
from aft_mm.config.reading import read_config
from aft_mm.errors import CONFIG_ERRORS, UserError, user_errors
from aft_mm.layers.mixers.aft_conv import AFTConv
from aft_mm.models import AFTViT
from aft_mm.outputs import check_writable

# Module names in checkpoints and in our model; the star is the number of the layer.
TIMM = {
    'patch_embed.proj': 'backbone.patch_embed.projection',
    'blocks.*.norm1': 'backbone.layers.*.norm1',
    'blocks.*.attn.qkv': 'backbone.layers.*.token_mixer.qkv',
    'blocks.*.attn.proj': 'backbone.layers.*.token_mixer.proj',
    'blocks.*.norm2': 'backbone.layers.*.norm2',
    'blocks.*.mlp.fc1': 'backbone.layers.*.mlp.0',
    'blocks.*.mlp.fc2': 'backbone.layers.*.mlp.3',
    'norm': 'backbone.norm',
    'head': 'head.fc',
}
MMPRETRAIN = {
    'patch_embed.projection': 'backbone.patch_embed.projection',
    'layers.*.ln1': 'backbone.layers.*.norm1',
    'layers.*.attn.qkv': 'backbone.layers.*.token_mixer.qkv',
    'layers.*.attn.proj': 'backbone.layers.*.token_mixer.proj',
    'layers.*.ln2': 'backbone.layers.*.norm2',
    'layers.*.ffn.layers.0.0': 'backbone.layers.*.mlp.0',
    'layers.*.ffn.layers.1': 'backbone.layers.*.mlp.3',
    'ln1': 'backbone.norm',
    'head.layers.head': 'head.fc',
}
NO_PLACE = {
    'cls_token': 'AFT-conv averages the tokens',
    'dist_token': 'AFT-conv averages the tokens',
    'pos_embed': 'AFT-conv has a position bias instead',
    'head_dist': 'its input is the distillation token',
}


class Row(NamedTuple):
    """A tensor of the checkpoint with its name in our model, or the reason why it is not copied."""

    source: str
    target: str | None
    reason: str = ''


def find_weights(checkpoint: Mapping, path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    weights = checkpoint.get('model', checkpoint.get('state_dict', checkpoint))
    if isinstance(weights, Mapping):
        weights = {str(name).removeprefix('backbone.'): x for name, x in weights.items()}
        for naming in (TIMM, MMPRETRAIN):
            first, qkv = (
                next(name for name, ours in naming.items() if ours.endswith(end))
                for end in ('patch_embed.projection', 'qkv')
            )
            if {f'{first}.weight', f'{qkv.replace("*", "0")}.weight'} <= weights.keys():
                return weights, naming
    raise UserError(
        f'{path!r} must be a DeiT or ViT in the naming of timm (blocks.0.attn.qkv), the official '
        'DeiT (the same below model) or mmpretrain (backbone.layers.0.attn.qkv)'
    )


def reason_against(name: str, head: bool) -> str | None:
    parts = name.split('.')
    reason = next((NO_PLACE[part] for part in parts if part in NO_PLACE), None)
    if reason is None and parts[0] == 'head' and not head:
        return '--no-head omits it'
    return reason


def starred(name: str) -> str:
    return re.sub(r'\.\d+\.', '.*.', name, count=1)


def our_name(name: str, naming: Mapping[str, str], path: str) -> str:
    module, _, kind = starred(name).rpartition('.')
    if module not in naming:
        way_out = '; --no-head omits the classifier' if name.startswith('head.') else ''
        raise UserError(f'{path!r} must be a plain DeiT or ViT, got one with {name}{way_out}')
    number = re.search(r'\.(\d+)\.', name)
    ours = naming[module] if number is None else naming[module].replace('*', number[1])
    return f'{ours}.{kind}'


def split_attention(
    name: str, fused: Tensor, backbone: AFTViT, query: bool, average_keys: bool
) -> dict[str, Tensor]:
    dims, heads = backbone.embed_dims, backbone.layers[0].token_mixer.num_heads
    if len(fused) != 3 * dims:
        raise UserError(
            f'{name} must hold query, key and value of D={dims} channels each, {3 * dims} rows, '
            f'got {list(fused.shape)}'
        )
    parts = dict(zip(('query', 'key', 'value'), fused.chunk(3), strict=True))
    parts['key'] = parts['key'].unflatten(0, (heads, -1)).mean(1)
    taken = dict(query=query, key=average_keys, value=True)
    return {part: tensor for part, tensor in parts.items() if taken[part]}


def convert(
    checkpoint: Mapping,
    path: str,
    backbone: AFTViT,
    head: nn.Module | None,
    query: bool,
    average_keys: bool,
) -> tuple[dict[str, Tensor], list[Row]]:
    weights, naming = find_weights(checkpoint, path)
    dims = len(next(x for name, x in weights.items() if name.startswith('patch_embed.')))
    if dims != backbone.embed_dims:
        raise UserError(
            f'{path!r} must have the {backbone.embed_dims} channels of the model of --config, got '
            f'{dims}'
        )
    converted: dict[str, Tensor] = {}
    rows = []
    for name, tensor in weights.items():
        reason = reason_against(name, head is not None)
        if reason is not None:
            rows.append(Row(name, None, reason))
            continue
        target = our_name(name, naming, path)
        if '.qkv.' not in target:
            converted[target] = tensor
            rows.append(Row(name, target))
            continue
        parts = split_attention(name, tensor, backbone, query, average_keys)
        for part, option in (('query', '--query'), ('key', '--average-keys'), ('value', '')):
            ours = target.replace('qkv', part)
            if part in parts:
                converted[ours] = parts[part]
                rows.append(Row(f'{name} ({part})', ours))
            else:
                reason = f'it has another meaning in AFT; {option} copies it'
                rows.append(Row(f'{name} ({part})', None, reason))
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
    if settings.get('type') != 'aft_mm.AFTViT':
        raise UserError(
            f'the backbone of --config must be aft_mm.AFTViT, got {settings.get("type")}'
        )
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope(config.get('default_scope', 'mmengine')):
        backbone = MODELS.build(settings)
    mixers: list[Any] = [layer.token_mixer for layer in backbone.layers]
    for mixer in mixers:
        if not isinstance(mixer, AFTConv):
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


def print_rows(rows: Sequence[Row], state: Mapping[str, Tensor]) -> None:
    lines = Counter(
        (starred(source), target and starred(target), reason) for source, target, reason in rows
    )
    table = Table('in the checkpoint', 'tensors', 'copied to, or reason')
    for (source, target, reason), number in lines.items():
        table.add_row(source, str(number), target or f'not copied: {reason}')
    taken = {target for _, target, _ in rows}
    for name, number in Counter(starred(name) for name in state if name not in taken).items():
        table.add_row('', str(number), f'{name} is newly initialised')
    console = Console(width=None if Console().is_terminal else 120)
    console.print(table)


def run(args: argparse.Namespace) -> None:
    with user_errors(*CONFIG_ERRORS):
        check_checkpoint(args.src)
        if Path(args.dst).exists():
            raise UserError(f'{args.dst!r} exists already and was not changed')
        check_writable('DST.pth', [args.dst])
        config = read_config(args.config)
        backbone = build_backbone(config, args.query)
        head = build_head(config) if args.head else None
        checkpoint = load_from_local(args.src, map_location='cpu')
        state, rows = convert(checkpoint, args.src, backbone, head, args.query, args.average_keys)
        meta = dict(experiment_name=f'{Path(args.src).name} converted for {Path(args.config).stem}')
        weights = {name: tensor.contiguous() for name, tensor in state.items()}
        torch.save(dict(meta=meta, state_dict=weights), args.dst)
    print_rows(rows, state)
    print(f'written to {args.dst}')
