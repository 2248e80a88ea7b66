import argparse
import json
import os
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from mmengine.analysis import ActivationAnalyzer, FlopAnalyzer, parameter_count
from mmengine.registry import MODELS, init_default_scope
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from aft_mm.checks import check_int
from aft_mm.config.masks import input_size
from aft_mm.config.reading import read_config
from aft_mm.errors import CONFIG_ERRORS, UserError, user_errors
from aft_mm.layers import Block
from aft_mm.models.block_stack import BlockStack
from aft_mm.outputs import check_output


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


# mmengine has rules for convolutions, linear layers, matrix products and norms only.
ELEMENTWISE = (
    'abs add addcmul div exp expm1 gelu log log_sigmoid maximum minimum mul neg pow reciprocal '
    'rsub sigmoid sqrt sub tanh'
).split()
REDUCTIONS = 'amax amin cumsum mean sum'.split()
OTHERS = (
    '_convolution addmm baddbmm bmm cross_entropy_loss einsum layer_norm linear log_softmax '
    'logsumexp matmul mm scaled_dot_product_attention softmax'
).split()
# Free operators, in addition to mmengine's list.
FREE = (
    '__or__ alias any clamp_min clone embedding expand_as feature_dropout flip isfinite le '
    'lift_fresh logical_and lt max_pool2d meshgrid movedim ne nan_to_num new_ones numel numpy_T '
    'ones_like pad repeat_interleave threshold unflatten unfold view_as where'
).split()

Handle = Callable[[list[Any], list[Any]], int]


def _elements(value: Any) -> int:
    shape = value.type().sizes() if value.isCompleteTensor() else None
    return prod(shape) if shape is not None and value.type().dtype().is_floating_point else 0


def _written(inputs: list[Any], outputs: list[Any]) -> int:
    return _elements(outputs[0])


def _read(inputs: list[Any], outputs: list[Any]) -> int:
    return _elements(inputs[0])


def _softmax(inputs: list[Any], outputs: list[Any]) -> int:
    return 5 * _elements(inputs[0])  # maximum, difference, exponential, sum, quotient


def _baddbmm(inputs: list[Any], outputs: list[Any]) -> int:
    return _elements(outputs[0]) * inputs[1].type().sizes()[-1]


def _attention(inputs: list[Any], outputs: list[Any]) -> int:
    query, key, value = (x.type().sizes() for x in inputs[:3])
    return prod(query[:-1]) * key[-2] * (query[-1] + value[-1] + 5)


def _handles(names: Sequence[str], handle: Handle | None) -> dict[str, Handle | None]:
    return {f'aten::{name}{suffix}': handle for name in names for suffix in ('', '_')}


class Likelihood(nn.Module):
    """An autoregressive model as a function of tokens: −log p of each token in nats."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder = model.encoder
        self.decoder = model.decoder
        self.head = model.head

    def forward(self, tokens: Tensor, *source: Tensor) -> Tensor:
        return self.head.nats(self._hidden(tokens, *source), tokens)

    def loss(self, tokens: Tensor, *source: Tensor) -> Tensor:
        return self.head.loss(self._hidden(tokens, *source), tokens)

    def _hidden(self, tokens: Tensor, *source: Tensor) -> Tensor:
        return self.decoder(tokens, *map(self.encoder, source))

    def shapes(self) -> list[tuple[int, ...]]:
        parts: list[Any] = [part for part in (self.decoder, self.encoder) if part is not None]
        return [(part.max_length, *part.embedding.token_shape) for part in parts]

    def saved_memory(self) -> SavedMemory:
        tokens = [torch.zeros(1, *shape, dtype=torch.long) for shape in self.shapes()]
        return saved_memory(self, lambda: self.loss(*tokens))


def analyse(model: nn.Module, *shapes: tuple[int, ...], tokens: bool = False) -> dict[str, Any]:
    """Count one forward pass in evaluation mode; operators without a rule are in ``uncounted``.

    ``shapes`` are those of the inputs without the batch; ``tokens`` makes them integers.
    """
    inputs = tuple(
        torch.zeros(1, *shape, dtype=torch.long) if tokens else torch.randn(1, *shape)
        for shape in shapes
    )
    flops = FlopAnalyzer(model.eval(), inputs)
    flops.set_op_handle(
        **_handles(ELEMENTWISE, _written),
        **_handles(REDUCTIONS, _read),
        **_handles(FREE, None),
        **{
            # Normalisers without a quotient have a logarithm instead.
            **_handles(('cross_entropy_loss', 'log_softmax', 'logsumexp', 'softmax'), _softmax),
            'aten::baddbmm': _baddbmm,
            'aten::scaled_dot_product_attention': _attention,
        },
    )
    activations = ActivationAnalyzer(model, inputs)
    activations.set_op_handle(**_handles(ELEMENTWISE + REDUCTIONS + OTHERS, _written))
    for analysis in (flops, activations):
        analysis.unsupported_ops_warnings(False)
        analysis.uncalled_modules_warnings(False)
        analysis.tracer_warnings('none')
    with torch.no_grad():
        return dict(
            parameters=parameter_count(model)[''],
            flops=int(flops.total()),
            activations=int(activations.total()),
            flops_by_operator={name: int(n) for name, n in flops.by_operator().most_common() if n},
            flops_by_module={name: int(n) for name, n in flops.by_module().items() if n},
            uncounted=dict(flops.unsupported_ops()),
        )


def analyse_config(path: str, shape: Sequence[int] | None = None) -> dict[str, Any]:
    config = read_config(os.fspath(path))
    init_default_scope(config.get('default_scope', 'mmengine'))
    if 'decoder' in config.model:
        if shape is not None:
            raise UserError(
                f'--shape cannot be used with {path}: a decoder is counted at the length of its grid'
            )
        model = Likelihood(MODELS.build(config.model))
        shapes = model.shapes()
        counts = analyse(model, *shapes, tokens=True)
        memory = model.saved_memory()
        return dict(config=Path(path).stem, shape=shapes[0], **counts, **memory._asdict())
    if 'roi_head' in config.model:
        raise UserError(
            f'{path} cannot be counted: the FLOPs of its roi_head depend on the number of '
            'proposed boxes'
        )
    if 'backbone' not in config.model:
        raise UserError(f'{path} cannot be counted: it must have a decoder or a backbone')
    backbone = config.model.backbone
    if 'with_mask_channel' in backbone:
        backbone.with_mask_channel = False
    if shape is None:
        shape = input_size(config)
        if shape is None:
            raise UserError(f'--shape must be given for {path}, which has no img_size')
    shape = (backbone.get('in_channels', 3), *shape)
    model = MODELS.build(config.model)
    counts = analyse(model, shape)
    memory = saved_memory(model, lambda: model(torch.randn(1, *shape)))
    return dict(config=Path(path).stem, shape=shape, **counts, **memory._asdict())


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    table = Table('config', 'input', title='per image or sequence; a multiply-add is one FLOP')
    units = dict(parameters='M', FLOPs='G', activations='M', saved='GB', recomputed='GB')
    for column, unit in units.items():
        table.add_column(f'{column} [{unit}]', justify='right')
    for row in rows:
        table.add_row(
            row['config'],
            ' x '.join(map(str, row['shape'])),
            f'{row["parameters"] / 1e6:.2f}',
            f'{row["flops"] / 1e9:.3f}',
            f'{row["activations"] / 1e6:.2f}',
            f'{row["saved"] / 1e9:.3f}',
            f'{row["recomputed"] / 1e9:.3f}',
        )
    console = Console(width=None if Console().is_terminal else 150)
    console.print(table)
    uncounted = {name for row in rows for name in row['uncounted']}
    if uncounted:
        console.print(f'Not counted (no rule): {", ".join(sorted(uncounted))}')


def run(args: argparse.Namespace) -> None:
    with user_errors(FileNotFoundError, *CONFIG_ERRORS):
        for name, size in zip(('HEIGHT', 'WIDTH'), args.shape or (), strict=False):
            check_int(f'{name} of --shape', size, 1)
        if args.json:
            check_output('--json', args.json, ('.json',))
        rows = [analyse_config(path, args.shape) for path in args.configs]
        print_table(rows)
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=2))
