"""Whether the maps that mmdet's heads receive have the strides that their configs declare."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from mmengine.config import Config
from mmengine.runner import Runner
from torch import nn

from aft_mm.errors import UserError

from .runner import task_model

#: Base classes of mmdet whose modules place boxes on maps by strides.
STRIDED = {'BaseDenseHead', 'BaseMaskHead', 'BaseRoIExtractor'}
#: Cells by which a level may differ: each halving rounds up or down.
MOST_CELLS = 2


def declared_strides(part: nn.Module) -> list[tuple[float, float]]:
    """Return the strides (y, x) of the maps of a dense head or RoI extractor [px], () of others."""
    if not STRIDED & {base.__name__ for base in type(part).__mro__}:
        return []
    generators = (getattr(part, f'{name}_generator', None) for name in ('prior', 'square_anchor'))
    for owner in (*generators, part):
        for name in ('strides', 'featmap_strides'):
            if strides := getattr(owner, name, None):
                pairs = (x if isinstance(x, Sequence) else (x, x) for x in strides)
                return [(y, x) for x, y in pairs]
    return []


def check_strides(config: Config, runner: Runner) -> None:
    """Let the first pass refuse maps whose number, or size times the declared stride, is wrong.

    mmdet's FPN makes levels of equal size from the maps of a plain backbone. A detector trains on
    them without an error, with its boxes in the wrong places.
    """
    model = task_model(runner)
    feeder = 'backbone' if getattr(model, 'neck', None) is None else 'neck'
    feeder = f'model.{feeder} {type(getattr(model, feeder, None)).__name__}'
    hint = 'after a backbone of one scale use the neck aft_mm.SimpleFeaturePyramid'
    if feeder.endswith('SimpleFeaturePyramid'):
        hint = 'set strides and num_outs of the neck'
    image: list[int] = []
    checked: set[str] = set()

    def note_size(backbone: nn.Module, inputs: Any) -> None:
        image[:] = inputs[0].shape[-2:]

    def compare(
        name: str, strides: list[tuple[float, float]], part: nn.Module, inputs: Any
    ) -> None:
        if name in checked:
            return
        checked.add(name)
        maps = getattr(part, 'resize_feats', list)(inputs[0])  # SOLO resizes its maps
        sizes = [level.shape[-2:] for level in maps]
        wrong = len(sizes) != len(strides) or any(
            abs(size - side / stride) >= MOST_CELLS
            for level, pair in zip(sizes, strides, strict=True)
            for size, side, stride in zip(level, image, pair, strict=True)
        )
        if wrong:
            found = ', '.join(f'{image[0] / height:.3g}' for height, _ in sizes)
            declared = ', '.join(f'{stride:.3g}' for stride, _ in strides)
            raise UserError(
                f'{feeder} gives {name} maps of strides {found} px, which must be the strides that '
                f'it declares, {declared}; {hint}'
            )

    for name, part in model.named_modules():
        if name.rpartition('.')[2] == 'backbone':
            part.register_forward_pre_hook(note_size)
        elif strides := declared_strides(part):
            part.register_forward_pre_hook(partial(compare, name, strides))
