"""The model that a config describes, without what a run wraps around it."""

from mmengine.model import BaseTTAModel, is_model_wrapper
from mmengine.runner import Runner
from torch import nn


def task_model(runner: Runner) -> nn.Module:
    """The runner's model inside DistributedDataParallel and test-time augmentation."""
    model = runner.model
    while is_model_wrapper(model) or isinstance(model, BaseTTAModel):
        model = model.module
    return model
