"""The leaf configs of a task, loaded and built once for all tests of a process."""

from functools import cache
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from torch import nn

ROOT = Path(__file__).parents[1]


def leaves(*tasks: str) -> dict[str, Path]:
    """The configs in the folders of `tasks` by their names."""
    return {path.stem: path for task in tasks for path in sorted(ROOT.glob(f'configs/{task}/*.py'))}


@cache
def load_leaf(path: Path) -> Config:
    config = Config.fromfile(path)
    init_default_scope(config.default_scope)
    return config


@cache
def build_leaf(path: Path) -> nn.Module:
    """The model without memory for its weights."""
    with torch.device('meta'):
        return MODELS.build(load_leaf(path).model)
