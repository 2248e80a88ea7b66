"""The configs of configs/, loaded and built once per process, and the parts of their names."""

import gc
import os
import re
from copy import deepcopy
from functools import cache
from pathlib import Path
from unittest import mock

import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from torch import nn
from torch.overrides import TorchFunctionMode

ROOT = Path(__file__).parents[1]
# Model, batch and length, data: docs/configs.md. The parts of a model name may be in any order.
NAME = re.compile(
    r'(?P<model>[^_]+)'
    r'_(?P<gpus>\d+)xb(?P<batch>\d+)-(?P<length>\d+)(?P<unit>[edxik])(?:-(?P<what>[^_]+))?'
    r'_(?P<data>[^_]+)'
)
PART = re.compile(r'-(?:([ldhk])(\d+)|(mini|tiny|small|base|quickstart))(?=-|$)')
PARSE = Config._file2dict
PARTS = dict(l='layers', d='dims', h='heads', k='kernel')


def configs_of(*tasks: str) -> dict[str, Path]:
    return {path.stem: path for task in tasks for path in sorted(ROOT.glob(f'configs/{task}/*.py'))}


@cache
def fields(name: str) -> dict:
    """Return the parts of a config name, None for those that are missing.

    They are `family` (of the model) and its `number` (a window or hashing rounds), `size`,
    `layers`, `dims`, `heads`, `kernel`, `gpus`, `batch`, `length` of the training with its `unit`,
    `what` differs, and `data`.
    """
    found = NAME.fullmatch(name).groupdict()
    model = found.pop('model')
    found |= dict(dict.fromkeys(PARTS.values()), size=None)
    for letter, number, size in PART.findall(model):
        found |= {PARTS[letter]: int(number)} if letter else {'size': size}
    family, number = re.fullmatch(r'(.+?)(?:-(\d+))?', PART.sub('', model)).groups()
    found |= {key: int(found[key]) for key in ('gpus', 'batch', 'length')}
    return dict(found, family=family, number=number and int(number))


@cache
def _parsed(data: str | None, *args, **options):
    return PARSE(*args, **options)


def _parse_once(*args, **options):
    """Return a copy, since most files are bases of many configs."""
    return deepcopy(_parsed(os.environ.get('AFT_MM_DATA'), *args, **options))


@cache
def _load(path: Path, data: str | None) -> Config:
    with mock.patch.object(Config, '_file2dict', _parse_once):
        return Config.fromfile(path)


def load_config(path: Path) -> Config:
    config = _load(path, os.environ.get('AFT_MM_DATA'))
    init_default_scope(config.default_scope)
    return config


def build_model(path: Path) -> nn.Module:
    load_config(path)
    return _build(path)


INITIALIZERS = {'uniform_', 'normal_', 'trunc_normal_', 'kaiming_uniform_', 'xavier_uniform_'}
INITIALIZERS |= {'erfinv_', 'mul_', 'add_', 'clamp_', 'fill_', 'zero_', 'constant_'}


class _WithoutInitialization(TorchFunctionMode):
    """The initialisation of weights takes most of the building time."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, '__name__', '') in INITIALIZERS:
            return kwargs['tensor'] if kwargs and 'tensor' in kwargs else args[0]
        return function(*args, **(kwargs or {}))


@cache
def _build(path: Path) -> nn.Module:
    with torch.device('meta'), _WithoutInitialization():
        model = MODELS.build(model_settings(load_config(path)))
    gc.freeze()  # it is cached, and datasets of the tests collect garbage
    return model


def model_settings(config: Config) -> dict:
    """Return a copy of the model part with the data preprocessor that mmengine would add."""
    return deepcopy({'data_preprocessor': config.get('data_preprocessor'), **config.model})
