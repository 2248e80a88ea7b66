"""The trained backbone from which a training on own data starts."""

import ast
import os
from pathlib import Path
from pprint import pformat
from typing import Any

from aft_mm.checkpoint import load_from_local
from aft_mm.config.finding import check_checkpoint
from aft_mm.config.writing import Literal
from aft_mm.errors import UserError
from aft_mm.models import AFTViT

from .data_licenses import assigned
from .packages import STARTS
from .vit_weights import save_converted

LAYERS = 4  # at the end of the backbone, which the head reads
# The whole image, but for the ends of its longer side.
PIPELINE = """
size = {}
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


class DictCalls(ast.NodeTransformer):
    """Write ``dict(a=1)`` as ``{'a': 1}``, which is a literal."""

    def visit_Call(self, node: ast.Call) -> ast.AST:  # noqa: N802 - the name that ast calls
        self.generic_visit(node)
        if ast.unparse(node.func) != 'dict' or node.args:
            return node
        keys: list[ast.expr | None] = [ast.Constant(word.arg) for word in node.keywords]
        return ast.Dict(keys, [word.value for word in node.keywords])


def entry(config: str, name: str) -> dict[str, Any]:
    """Return a dict of the text of a config, without running it; empty if there is none."""
    value = assigned(config, name)
    try:
        found = None if value is None else ast.literal_eval(DictCalls().visit(value))
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def start_lines(start: str, out: Path) -> list[str]:
    """Return the lines of a config `out` whose backbone is that of a start, frozen.

    The weights of a package are written next to the config.

    Args:
        start: A name of STARTS, or a checkpoint of aft_mm.
        out: Path of the config.

    Raises:
        UserError: The start is missing, damaged, or has no backbone of aft_mm.
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
    backbone = model.get('backbone') or {}
    if backbone.get('type') not in ('AFTViT', 'aft_mm.AFTViT'):
        raise UserError(
            f'--start must be {" or ".join(STARTS)}, or a checkpoint with the config of a model whose '
            f'backbone is aft_mm.AFTViT, got {start!r}; `aft_mm convert vit` converts others'
        )
    dims, depth, _ = AFTViT.parse_arch(backbone.get('arch', 'tiny'))
    for name in ('type', 'out_indices', 'init_cfg', 'with_mask_channel', 'drop_path_rate'):
        backbone.pop(name, None)
    layers = range(max(0, depth - LAYERS), depth)
    backbone |= dict(
        out_indices=tuple(layers),
        out_type='cls_token' if backbone.get('with_cls_token') else 'avg_featmap',
        frozen_stages=depth,
    )
    weights = {
        name.removeprefix('backbone.'): tensor
        for name, tensor in checkpoint.get('state_dict', {}).items()
        if name.startswith('backbone.')
    }
    AFTViT(**backbone).load_state_dict(weights)  # raises unless they fit
    pretrained = dict(
        type='Pretrained', checkpoint=Literal(os.path.abspath(path)), prefix='backbone'
    )
    settings = dict(_delete_=True, type='aft_mm.AFTViT', **backbone, init_cfg=pretrained)
    pixels = model.get('data_preprocessor') or entry(text, 'data_preprocessor')
    pixels = {name: pixels[name] for name in ('mean', 'std') if name in pixels}
    size = backbone.get('img_size', 224)
    return [
        '',
        f'# Only the head is trained, on the features of {Literal(start)!r}.',
        f"model['backbone'] = {pformat(settings, width=96, sort_dicts=False)}",
        f"model['neck'] = dict(in_channels={dims})",
        f"model['head']['in_channels'] = {dims * len(layers)}",
        f'data_preprocessor |= {pixels}',
        *PIPELINE.format(size if isinstance(size, int) else min(size)).splitlines(),
    ]
