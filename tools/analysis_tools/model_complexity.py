"""Parameters, FLOPs and activations of the models of configs, AFT's own operations included.

Convention: a multiplication with the addition that follows it is one FLOP (a MAC counts once), as
in most papers on image models. An exponential or another element-wise operation is one FLOP per
element it writes, a sum one per element it reads, a softmax or layer norm five per element;
comparisons, selections and moving data are free. Activations are the elements that the counted
operations write.

All is for one image and for the operations that run in evaluation mode on the CPU, so the algorithm
an AFT op chooses matters: AFT-local may sum over its window or be a dense product, if T is small.
Of an autoregressive model it is the likelihood of one sequence as long as the position table: all
tokens at once through decoder and head, after a source as long as the encoder's table through that.
An image is whole: the mask channel, which hides the padding of a batch, is switched off.

Saved is the memory that the backward pass of training needs for one sample in float32, without
parameters, gradients and the optimizer's state; recomputed is the same with `with_cp=True`.
"""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

from aft_mm.cli.arguments import check_output
from aft_mm.errors import UserError, one_sentence


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('configs', nargs='+', help='paths of configs')
    parser.add_argument(
        '--shape', nargs=2, type=int, metavar=('HEIGHT', 'WIDTH'), help='default: the config says'
    )
    parser.add_argument(
        '--json', metavar='FILE', help='write all counts, also by operator and by module'
    )
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()  # --help and a wrong argument end before the slow imports

import torch
from mmengine.analysis import ActivationAnalyzer, FlopAnalyzer, parameter_count
from mmengine.registry import MODELS, init_default_scope
from rich.console import Console
from rich.table import Table
from saved_memory import saved_memory
from torch import Tensor, nn

from aft_mm.checks import check_int
from aft_mm.cli.command_line import CONFIG_ERRORS, read_config

# mmengine counts convolutions, linear layers, matrix products and norms; the rest is ours.
ELEMENTWISE = (
    'abs',
    'add',
    'addcmul',
    'div',
    'exp',
    'expm1',
    'gelu',
    'log',
    'log_sigmoid',
    'maximum',
    'minimum',
    'mul',
    'neg',
    'pow',
    'reciprocal',
    'rsub',
    'sigmoid',
    'sqrt',
    'sub',
    'tanh',
)
REDUCTIONS = ('amax', 'amin', 'cumsum', 'mean', 'sum')
OTHERS = (
    '_convolution',
    'addmm',
    'baddbmm',
    'bmm',
    'cross_entropy_loss',
    'einsum',
    'layer_norm',
    'linear',
    'log_softmax',
    'logsumexp',
    'matmul',
    'mm',
    'scaled_dot_product_attention',
    'softmax',
)
# Free, and unknown to mmengine's own list of such.
FREE = (
    '__or__',
    'alias',
    'any',
    'clamp_min',
    'clone',
    'embedding',
    'expand_as',
    'feature_dropout',
    'flip',
    'isfinite',
    'le',
    'lift_fresh',
    'logical_and',
    'lt',
    'max_pool2d',
    'meshgrid',
    'movedim',
    'ne',
    'nan_to_num',
    'new_ones',
    'numpy_T',
    'ones_like',
    'pad',
    'repeat_interleave',
    'threshold',
    'unflatten',
    'unfold',
    'view_as',
    'where',
)

Handle = Callable[[list[Any], list[Any]], int]


def _elements(value: Any) -> int:
    """Elements of a traced tensor; indices and truth values are not counted."""
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
    """Scaled dot products of ``[B, h, T, d]`` with ``[B, h, S, d]``, softmax, mean of v."""
    query, key, value = (x.type().sizes() for x in inputs[:3])
    return prod(query[:-1]) * key[-2] * (query[-1] + value[-1] + 5)


def _handles(names: Sequence[str], handle: Handle | None) -> dict[str, Handle | None]:
    """The handle for each operator and for its in-place form; None makes it free."""
    return {f'aten::{name}{suffix}': handle for name in names for suffix in ('', '_')}


class Likelihood(nn.Module):
    """An autoregressive model as a module that takes tokens only: −log p of each, in nats."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.encoder = model.encoder
        self.decoder = model.decoder
        self.head = model.head

    def forward(self, tokens: Tensor, *source: Tensor) -> Tensor:
        memory = [self.encoder(part) for part in source]
        return self.head.nats(self.decoder(tokens, *memory), tokens)

    def loss(self, tokens: Tensor, *source: Tensor) -> Tensor:
        """As forward, by the training loss of the head."""
        memory = [self.encoder(part) for part in source]
        return self.head.loss(self.decoder(tokens, *memory), tokens)


def analyse(model: nn.Module, *shapes: tuple[int, ...], tokens: bool = False) -> dict[str, Any]:
    """Count one forward pass of the model in evaluation mode.

    Args:
        model: Any module that takes tensors, of floats unless ``tokens`` says integers.
        shapes: Shape of each input without the batch, such as ``(3, 224, 224)``.

    Returns:
        parameters, flops and activations (ints), flops_by_operator and flops_by_module (dicts), and
        uncounted: operators that no rule covers, with the number of their calls.
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
            # Of the normalisers without a quotient the logarithm is the fifth.
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
    """:func:`analyse` the model of a config; `shape` is (height, width), or else the config's."""
    config = read_config(os.fspath(path))
    init_default_scope(config.get('default_scope', 'mmengine'))
    if 'decoder' in config.model:
        if shape is not None:
            raise UserError(
                f'{path} has a decoder, which is counted on the whole of its position '
                'table, without --shape'
            )
        model = Likelihood(MODELS.build(config.model))
        parts = [part for part in (model.decoder, model.encoder) if part is not None]
        shapes = [(part.max_length, *part.embedding.token_shape) for part in parts]
        counts = analyse(model, *shapes, tokens=True)
        tokens = [torch.zeros(1, *shape, dtype=torch.long) for shape in shapes]
        memory = saved_memory(model, lambda: model.loss(*tokens))
        return dict(config=Path(path).stem, shape=shapes[0], **counts, **memory._asdict())
    if 'roi_head' in config.model:
        raise UserError(
            f'{path} is a detector with a roi_head, whose work depends on how many '
            'boxes it proposes, so it is not counted'
        )
    backbone = config.model.get('backbone', {})
    if 'with_mask_channel' in backbone:
        backbone.with_mask_channel = False
    if shape is None:
        size = backbone.get('img_size')
        if size is None:
            raise UserError(f'model.backbone of {path} says no img_size, so --shape is needed')
        shape = (size, size) if isinstance(size, int) else tuple(size)
    shape = (backbone.get('in_channels', 3), *shape)
    model = MODELS.build(config.model)
    counts = analyse(model, shape)
    memory = saved_memory(model, lambda: model(torch.randn(1, *shape)))
    return dict(config=Path(path).stem, shape=shape, **counts, **memory._asdict())


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """One line per config, and the operators that were not counted, if there were any."""
    table = Table('config', 'input', title='of one image or sequence; a multiply-add is one FLOP')
    for column in (
        'parameters [M]',
        'FLOPs [G]',
        'activations [M]',
        'saved [GB]',
        'recomputed [GB]',
    ):
        table.add_column(column, justify='right')
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
        console.print(f'Not counted, no rule for: {", ".join(sorted(uncounted))}')


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)

    with one_sentence(FileNotFoundError, *CONFIG_ERRORS):
        count(args)


def count(args: argparse.Namespace) -> None:
    """Analyse and print what the arguments say."""
    for name, size in zip(('HEIGHT', 'WIDTH'), args.shape or (), strict=False):
        check_int(f'{name} of --shape', size, 1)
    if args.json:
        check_output('--json', args.json, ('.json',))
    rows = [analyse_config(path, args.shape) for path in args.configs]
    print_table(rows)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2))


if __name__ == '__main__':
    main()
