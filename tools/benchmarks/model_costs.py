"""Count kernels, bytes and floating-point operations of a model from its config.

Every aten operator that would launch a kernel is recorded on torch's meta device with the bytes of
its inputs and outputs, and for products with the operations of torch's flop_registry, where a
multiply-add is two. scaled_dot_product_attention is one kernel that reads q, k, v and writes y
once, like flash attention; its backward pass has five products, forward has two.

The mixing of AFT is one kernel that reads query, key and value and writes the output once, without
operations, a lower bound for any implementation.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.registry import MODELS, init_default_scope
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from aft_mm.config.reading import read_config
from aft_mm.layers.mixers import AFTMixer

CONFIGS = Path(__file__).parents[2] / 'configs'
# Queries and keys of a tile of flash attention; incomplete tiles are computed completely.
TILE = 128
# Operators without a kernel, in addition to views.
FREE = ('empty', 'new_empty', '_unsafe_view', 'detach')


@dataclass(frozen=True)
class Kernel:
    """One launch: 'product', 'attention', 'mixing' or 'element-wise', its operations and bytes.

    `computed` are the operations of attention including incomplete tiles.
    """

    kind: str
    operations: float
    bytes: int
    computed: float = 0.0


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        packet = function.overloadpacket
        if not function.is_view and not packet.__name__.startswith(FREE):
            count = flop_registry.get(packet)
            operations = count(*args, **(kwargs or {}), out_val=result) if count else 0
            moved = sum(map(_nbytes, tree_leaves((args, kwargs, result))))
            self.kernels.append(Kernel('product' if count else 'element-wise', operations, moved))
        return result


def _nbytes(x: Any) -> int:
    """Return the bytes in memory, which are fewer for expanded tensors."""
    return min(x.nbytes, x.untyped_storage().nbytes()) if isinstance(x, Tensor) else 0


class _OneKernel(torch.autograd.Function):
    """(q, k, v) -> y, recorded as one kernel in forward and backward."""

    @staticmethod
    def forward(ctx, query, key, value, record: Callable[[str, int], None]):
        ctx.save_for_backward(query, key, value)
        ctx.record = record
        output = torch.empty_like(query if query.dim() == 4 else value)
        record('forward', sum(map(_nbytes, (query, key, value, output))))
        return output

    @staticmethod
    def backward(ctx, gradient):
        inputs = ctx.saved_tensors
        ctx.record('backward', 2 * sum(map(_nbytes, inputs)) + _nbytes(gradient))
        return (*map(torch.empty_like, inputs), None)


class FlashAttention(TorchFunctionMode):
    def __init__(self, kernels: list[Kernel]) -> None:
        super().__init__()
        self.kernels = kernels

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        query, key, value = args[:3]
        rows, columns = query.shape[-2], key.shape[-2]
        share = 0.5 if (kwargs or {}).get('is_causal') else 1.0
        padded = math.ceil(rows / TILE) * TILE * math.ceil(columns / TILE) * TILE

        def record(direction: str, moved: int) -> None:
            products = 2 if direction == 'forward' else 5
            pair = share * products * 2 * query.shape[:-2].numel() * query.shape[-1]
            self.kernels.append(Kernel('attention', pair * rows * columns, moved, pair * padded))

        return _OneKernel.apply(query, key, value, record)


class WithoutValues(TorchFunctionMode):
    """Skip in-place functions, since the initialisation of weights is slow."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = function.__name__
        if args and name.endswith('_') and not name.endswith('__') and name != 'requires_grad_':
            return args[0]
        return function(*args, **(kwargs or {}))


def read_model(name: str, dtype: torch.dtype, **changes: Any) -> nn.Module:
    config = read_config(str(CONFIGS / f'{name}.py'))
    init_default_scope(config.default_scope)
    part = config.model.get('backbone') or config.model.decoder
    part.update(changes)
    with WithoutValues(), torch.device('meta'):
        return MODELS.build(part).eval().to(dtype)


def trace(model: nn.Module, forward: Callable[[Tensor], Any], inputs: Tensor) -> list[Kernel]:
    with Recorder() as recorder:
        kernels = recorder.kernels

        def mix(query, key, value, *ignored: Any) -> Tensor:
            return _OneKernel.apply(
                query, key, value, lambda _, moved: kernels.append(Kernel('mixing', 0, moved))
            )

        for module in model.modules():
            if isinstance(module, AFTMixer):
                module._mix = mix
        with FlashAttention(kernels), torch.set_grad_enabled(inputs.requires_grad):
            output = forward(inputs)
            if inputs.requires_grad:
                output.backward(torch.empty_like(output))
    return kernels


def image_kernels(
    name: str, size: int, batch: int, dtype: torch.dtype, training: bool = False
) -> list[Kernel]:
    """Return the kernels of inference or of a training step of the backbone of a config."""
    model = read_model(name, dtype, img_size=size)
    shape = batch, 3, size, size
    images = torch.empty(shape, dtype=dtype, device='meta', requires_grad=training)
    return trace(model, lambda x: model(x)[0], images)


def decoder_kernels(name: str, tokens: int, batch: int, dtype: torch.dtype) -> list[Kernel]:
    model = read_model(name, dtype, grid=(tokens,))
    shape = batch, tokens, model.embed_dims
    hidden = torch.empty(shape, dtype=dtype, device='meta', requires_grad=True)
    return trace(model, model.run_blocks, hidden)
