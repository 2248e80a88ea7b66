"""Compilation of the backbone."""

import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner

from aft_mm.checks import check_text
from aft_mm.registry import HOOKS

from .task_model import task_model

MOST_GRAPHS = 2**20  # as good as any number of them


@HOOKS.register_module()
class CompileHook(Hook):
    """Compile one part of the model, whole or not at all, before a run.

    mmengine's ``cfg.compile`` compiles the training step, with a graph break at every backward and
    optimizer call. The part is compiled in place: state dict keys stay as they are, and a copy such
    as the EMA model stays uncompiled.

    Args:
        module: Attribute of the model to compile.
        **kwargs: Those of ``torch.compile``, such as ``backend`` or ``mode``. Unless given,
            ``fullgraph`` is True, so that a graph break is an error, and ``dynamic`` is False, a
            graph per image size: torch 2.11 cannot trace ``torch.cond`` for a symbolic one.
    """

    def __init__(self, module: str = 'backbone', **kwargs) -> None:
        check_text('module of CompileHook', module)
        self.module = module
        self.kwargs = {'fullgraph': True, 'dynamic': False, **kwargs}

    def before_run(self, runner: Runner) -> None:
        """Compile before anything else of the run; weights are loaded in place later."""
        # Of this process: after 8 sizes torch would give up, which with fullgraph is an error.
        limits = torch._dynamo.config
        limits.cache_size_limit = max(limits.cache_size_limit, MOST_GRAPHS)
        limits.accumulated_cache_size_limit = max(limits.accumulated_cache_size_limit, MOST_GRAPHS)
        task_model(runner).get_submodule(self.module).compile(**self.kwargs)
