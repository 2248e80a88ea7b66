"""Registries of the package, children of mmengine's root: a type of ours is written ``aft_mm.X``.

mmengine imports this module when it first meets the prefix ``aft_mm.``, and a registry's locations
when it first looks a name up, so configs need no further import. An ImportError in here would be
hidden by mmengine; import nothing that can fail.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec

from mmengine import registry as root

from aft_mm.checkpoint import register_safe_loading

__all__ = [
    'DATASETS',
    'DATA_SAMPLERS',
    'HOOKS',
    'LOOPS',
    'METRICS',
    'MODELS',
    'OPTIM_WRAPPERS',
    'OPTIM_WRAPPER_CONSTRUCTORS',
    'PARAM_SCHEDULERS',
    'TRANSFORMS',
]

# Token mixers and blocks, then backbones and the rest of a model.
MODELS = root.Registry(
    'model', parent=root.MODELS, scope='aft_mm', locations=['aft_mm.layers', 'aft_mm.models']
)
# One file per kind of data.
DATASETS = root.Registry(
    'dataset', parent=root.DATASETS, scope='aft_mm', locations=['aft_mm.datasets']
)
# The order of samples, and which make a batch.
DATA_SAMPLERS = root.Registry(
    'data sampler', parent=root.DATA_SAMPLERS, scope='aft_mm', locations=['aft_mm.datasets']
)
# Steps of a data pipeline.
TRANSFORMS = root.Registry(
    'transform', parent=root.TRANSFORMS, scope='aft_mm', locations=['aft_mm.datasets.transforms']
)
# Numbers that say how good a model is.
METRICS = root.Registry(
    'metric', parent=root.METRICS, scope='aft_mm', locations=['aft_mm.evaluation']
)
# What happens around the iterations of a run, how a gradient becomes a step, and how large a one,
# for all parameters and for each.
HOOKS = root.Registry('hook', parent=root.HOOKS, scope='aft_mm', locations=['aft_mm.engine'])
OPTIM_WRAPPERS = root.Registry(
    'optim_wrapper', parent=root.OPTIM_WRAPPERS, scope='aft_mm', locations=['aft_mm.engine']
)
OPTIM_WRAPPER_CONSTRUCTORS = root.Registry(
    'optimizer wrapper constructor',
    parent=root.OPTIM_WRAPPER_CONSTRUCTORS,
    scope='aft_mm',
    locations=['aft_mm.engine'],
)
PARAM_SCHEDULERS = root.Registry(
    'parameter scheduler', parent=root.PARAM_SCHEDULERS, scope='aft_mm', locations=['aft_mm.engine']
)
# How a test runs that draws samples on its way.
LOOPS = root.Registry('loop', parent=root.LOOPS, scope='aft_mm', locations=['aft_mm.engine'])
# Nothing of ours; mmengine warns at the start of a run where the default scope lacks one of these.
for _parent in (root.OPTIMIZERS, root.VISBACKENDS, root.VISUALIZERS):
    root.Registry(_parent.name, parent=_parent, scope='aft_mm', locations=['aft_mm.engine'])

register_safe_loading()


class _MMCVOperators(MetaPathFinder):
    """Let an mmcv without compiled operators import ``mmcv._ext`` from :mod:`aft_mm.hosts`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        if name != 'mmcv._ext':
            return None
        return import_module('aft_mm.hosts').extension_spec(path)


sys.meta_path.insert(0, _MMCVOperators())
