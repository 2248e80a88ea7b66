"""Count launches and bytes of ops: composite, compiled by Inductor, and as Triton kernels.

    python tools/benchmarks/op_counts.py --json OUT.json

Nothing is computed, and no GPU is needed. Inductor counts the buffers that the kernels of its CUDA
source read and write. A Triton kernel counts each tensor that its code reads or writes once, but of
recomputations only the flags: no tile is flagged. The bound reads query, key, value and bias once
and writes the output, with backward twice that and the output's gradient.
Tokens are bfloat16, biases float32.
"""

import argparse
import json
import re
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--json', type=Path, help='write the rows to this file')
    return parser.parse_args()


if __name__ == '__main__':
    parse_args()  # before the slow imports

import torch
from bounds import ATTAINED, BATCH, DECODERS, GPUS, IMAGES, SEQUENCES, kernel_seconds
from inductor_offline import source_and_bytes
from kernel_forms import offline_kernels
from model_costs import FREE, Kernel, _nbytes, decoder_kernels, image_kernels
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import JITFunction

from aft_mm import ops
from aft_mm.ops.eager import banded_matmul, conv, conv_dense, full_local, simple
from aft_mm.ops.kernel_check import using
from aft_mm.ops.triton import recompute_flagged
from aft_mm.ops.triton.availability import KERNELS
from aft_mm.ops.triton.matmul import MatmulSaved

# Op, options, tokens, and shapes of the biases.
CASES = {
    'conv small, 224 px': ('aft_conv', dict(grid=(14, 14)), (128, 196, 384), ((384, 11, 11),)),
    'conv small, 512 px': ('aft_conv', dict(grid=(32, 32)), (32, 1024, 384), ((384, 11, 11),)),
    'local-256': ('aft_local', dict(causal=True, window=256), (16, 3072, 256), ((3072, 64),) * 2),
    'simple': ('aft_simple', dict(causal=True), (16, 3072, 256), ()),
    'hard-32': ('aft_local_hard', dict(causal=True, window=32), (16, 3072, 256), ()),
}


class _Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.moved: list[int] = []

    def add(self, *arguments) -> None:
        tensors = {id(x): x for x in tree_leaves(arguments) if isinstance(x, Tensor)}
        self.moved.append(sum(map(_nbytes, tensors.values())))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == 'aft_mm':
            below = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # the function, not this mode
            with self:
                return function.redispatch(below, *args, **(kwargs or {}))
        result = function(*args, **(kwargs or {}))
        if not function.is_view and not function.overloadpacket.__name__.startswith(FREE):
            self.add(args, kwargs, result)
        return result


@contextmanager
def _as_on_cuda():
    def precision(value: Tensor) -> str:
        return 'bf16x2' if torch.is_grad_enabled() else 'bf16'

    is_applicable = conv_dense.is_applicable

    def dense(value: Tensor, *args) -> bool:
        on_cuda = SimpleNamespace(device=SimpleNamespace(type='cuda'), shape=value.shape)
        return is_applicable(on_cuda, *args)

    with ExitStack() as stack:
        for module in (conv, full_local):
            stack.enter_context(mock.patch.object(module, 'matmul_precision', precision))
        stack.enter_context(mock.patch.object(conv, 'DENSE_DEVICES', ('cpu', 'cuda', 'meta')))
        stack.enter_context(mock.patch.object(conv_dense, 'is_applicable', dense))
        stack.enter_context(mock.patch.object(banded_matmul, 'CHUNK', banded_matmul.CUDA_CHUNK))
        yield


def _step(op: str, options: dict, training: bool, *inputs: Tensor) -> tuple:
    leaves = [x.detach().requires_grad_(training) for x in inputs]
    with torch.set_grad_enabled(training):
        output = getattr(ops, op)(*leaves, **options)
        if training:
            return output, *torch.autograd.grad(output, leaves, torch.empty_like(output))
        return (output,)


def _inputs(tokens, biases, device: str) -> list[Tensor]:
    made = [torch.empty(tokens, dtype=torch.bfloat16, device=device) for _ in range(3)]
    return [*made, *(torch.empty(shape, device=device) for shape in biases)]


def composite(op: str, options: dict, tokens, biases, training: bool) -> tuple[int, int]:
    with _as_on_cuda(), using('eager'), _Launches() as recorder:
        _step(op, options, training, *_inputs(tokens, biases, 'meta'))
    return len(recorder.moved), sum(recorder.moved)


def compiled(op: str, options: dict, tokens, biases, training: bool) -> tuple[int, int]:
    def fast_path(condition, fast, safe, operands):
        return fast(*operands)

    def step(*inputs):
        return _step(op, options, training, *inputs)

    with _as_on_cuda(), using('eager'):
        with mock.patch.object(torch.compiler, 'is_compiling', lambda: True):
            with (
                mock.patch.object(torch, 'cond', fast_path),
                mock.patch.object(simple, 'is_one_scan', lambda key: True),
            ):
                source, moved = source_and_bytes(step, *[tokens] * 3, *biases, dtype=torch.bfloat16)
    return source.count('.run(') + source.count(' extern_kernels.'), moved


def used_tensors(ttir: str, arguments: tuple) -> list[Tensor]:
    """Return the tensors among the arguments of a kernel that its code uses."""
    head, body = re.search(
        r'tt\.func public @\w+\((.*?)\n?\) attributes[^\n]*\n(.*)', ttir, re.S
    ).groups()
    pointers = re.findall(r'(%[\w.]+): !tt\.ptr', head)
    tensors = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
    pairs = zip(pointers, tensors, strict=True)
    return [x for name, x in pairs if re.search(re.escape(name) + r'(?![\w.])', body)]


def kernels(op: str, options: dict, tokens, biases, training: bool) -> tuple[int, int]:
    with offline_kernels(), using('triton'), _Launches() as recorder:
        run = JITFunction.run

        def launch(self, *args, **arguments):
            kernel = run(self, *args, **arguments)
            if self.fn.__module__ == recompute_flagged.__name__:
                saved = next(x for x in args if isinstance(x, MatmulSaved))
                recorder.add(saved.flags)
            else:
                recorder.add(used_tensors(kernel.asm['ttir'], args))
            return kernel

        with mock.patch.object(JITFunction, 'run', launch):
            _step(op, options, training, *_inputs(tokens, biases, 'cpu'))
    return len(recorder.moved), sum(recorder.moved)


def bound(op: str, options: dict, tokens, biases, training: bool) -> tuple[int, int]:
    inputs = sum(x.nbytes for x in _inputs(tokens, biases, 'meta'))
    output = 2 * torch.Size(tokens).numel()
    return (2, 3 * inputs + 2 * output) if training else (1, inputs + output)


FORMS = ('composite', 'compiled', 'kernels', 'bound')


def model_row(name: str, models: list[list[Kernel]], numbers: int, row: dict) -> dict:
    """Return time(rival) / time(AFT) for each form of the mixing of an H200.

    `models` are the kernels of AFT and of its rival, `numbers` those of a tensor of tokens.
    """
    gpu = GPUS['h200']

    def total(kernels) -> float:
        return sum(kernel_seconds(kernel, gpu, 'bfloat16') for kernel in kernels)

    aft, rival = models
    rest = total(kernel for kernel in aft if kernel.kind != 'mixing')
    # A training step has one kernel for each direction.
    layers = sum(kernel.kind == 'mixing' for kernel in aft) // (2 if row['training'] else 1)
    found = dict(model=name)
    for form in FORMS:
        moved = row[form]['bytes_per_number'] * numbers / (ATTAINED['memory'] * gpu.memory)
        mixing = max(moved, row[form]['launches'] * gpu.launch)
        found[form] = total(rival) / (rest + layers * mixing)
    return found


def model_rows(rows: list[dict]) -> list[dict]:
    counts, found = {(row['op'], row['training']): row for row in rows}, []
    names = [f'image_classification/{name}' for name in IMAGES['small h384 k11']]
    for training, size in product((False, True), (224, 512)):
        models = [image_kernels(name, size, BATCH, torch.bfloat16, training) for name in names]
        row = counts[f'conv small, {size} px', training]
        numbers = BATCH * (size // 16) ** 2 * 384
        what = 'training step' if training else 'inference'
        found.append(model_row(f'AFT-conv small, {size} px, {what}', models, numbers, row))
    *names, lengths = DECODERS['AFT-local-256, L 24, d 256']
    models = [decoder_kernels(name, lengths[0], SEQUENCES, torch.bfloat16) for name in names]
    row, numbers = counts['local-256', True], SEQUENCES * lengths[0] * 256
    return [*found, model_row('AFT-local-256, training step', models, numbers, row)]


def main() -> None:
    args = parse_args()
    rows = []
    print('| op | composite | compiled | kernels | bound |\n| --- | --- | --- | --- | --- |')
    for name, case in CASES.items():
        numbers = torch.Size(case[2]).numel()
        for training in (False, True):
            row = dict(op=name, training=training)
            for form in (composite, compiled, kernels, bound):
                if form is kernels and case[0] not in KERNELS:
                    continue
                launches, moved = form(*case, training)
                row[form.__name__] = dict(launches=launches, bytes_per_number=moved / numbers)
            rows.append(row)
            cells = [
                f'{row[form]["bytes_per_number"]:.0f} ({row[form]["launches"]})'
                if form in row
                else '–'
                for form in FORMS
            ]
            mode = 'with backward' if training else 'forward'
            print(f'| {name}, {mode} | ' + ' | '.join(cells) + ' |', flush=True)
    models = model_rows(rows)
    print('\n| model | composite | compiled | kernels | bound |\n| --- | --- | --- | --- | --- |')
    for row in models:
        print(f'| {row["model"]} | ' + ' | '.join(f'{row[form]:.2f}' for form in FORMS) + ' |')
    if args.json:
        args.json.write_text(json.dumps(dict(rows=rows, models=models), indent=1) + '\n')


if __name__ == '__main__':
    main()
