"""Bytes that autograd saves for the backward pass, counted for :mod:`.model_complexity`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aft_mm.layers import Block
from aft_mm.models.block_stack import BlockStack


class SavedMemory(NamedTuple):
    """Bytes for one sample: all activations, and with every block recomputed (``with_cp=True``)."""

    saved: int
    recomputed: int


def saved_memory(model: nn.Module, run: Callable[[], Tensor]) -> SavedMemory:
    """Count the distinct storages that the backward pass of `run` needs, without the parameters.

    `run` is the forward pass of one sample. Of blocks of a :class:`BlockStack` with one config, the
    first runs and counts for all. A GPU may save more or less.
    """
    model.train()
    module: Any
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()  # one sample may be one value per channel
        if hasattr(module, 'with_cp'):
            module.with_cp = False
    persistent = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    counted: dict[nn.Module | None, int] = {None: 0}
    inputs: dict[nn.Module, int] = {}
    repeats: dict[nn.Module | None, int] = {}
    current: list[nn.Module | None] = [None]
    storages: dict[int, Tensor] = {}  # held, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in persistent and storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = tensor
            counted[current[-1]] += storage.nbytes()
        return tensor

    def enter(block: nn.Module, args: tuple[Tensor, ...]) -> None:
        current.append(block)
        counted[block] = 0
        inputs[block] = args[0].untyped_storage().nbytes()

    def leave(block: nn.Module, args: tuple[Tensor, ...], output: object) -> None:
        current.pop()

    stacks = [module for module in model.modules() if isinstance(module, BlockStack)]
    layers = [stack.layers for stack in stacks]
    for stack in stacks:
        mixers = stack.mixer_configs
        firsts = [i for i, mixer in enumerate(mixers) if mixers.index(mixer) == i]
        repeats.update((stack.layers[i], mixers.count(mixers[i])) for i in firsts)
        stack.layers = nn.ModuleList(stack.layers[i] for i in firsts)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    hooks = [block.register_forward_pre_hook(enter) for block in blocks]
    hooks += [block.register_forward_hook(leave) for block in blocks]
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            run()
    finally:
        for hook in hooks:
            hook.remove()
        for stack, all_layers in zip(stacks, layers, strict=True):
            stack.layers = all_layers
    rest = counted.pop(None)
    saved = rest + sum(n * repeats.get(block, 1) for block, n in counted.items())
    if not counted:
        return SavedMemory(saved, saved)
    kept = sum(n * repeats.get(block, 1) for block, n in inputs.items())
    return SavedMemory(saved, rest + kept + max(counted.values()))
