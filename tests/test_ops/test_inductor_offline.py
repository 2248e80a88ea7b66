"""torch.compile for CUDA writes a kernel for every op at the sizes of the configs.

Inductor lowers scans of few columns differently for CUDA than for CPUs.
"""

from functools import partial
from itertools import product

import pytest
import torch

from aft_mm import ops
from aft_mm.ops.eager import banded_matmul, bf16_matmul, conv, conv_dense, full_local, simple

pytest.importorskip('triton', reason='Inductor writes Triton source for a GPU')

from ..helpers import nightly  # noqa: E402
from ..inductor_offline import pretended_device, source_of  # noqa: E402

pytestmark = pytest.mark.slow

T3072 = (2, 3072, 256)
RASTER = dict(grid=(32, 96), window=(16, 16))
FACTORS = ((3072, 64), (3072, 64))
# The op, its options, and the shapes of query, key and value and of the biases.
CASES = {
    'simple': ('aft_simple', dict(causal=True), T3072, ()),
    'relu': ('aft_simple', dict(causal=True, key_function='relu'), T3072, ()),
    'full': ('aft_full', dict(causal=True), (8, 197, 192), ((197, 197),)),
    'local': ('aft_local', dict(causal=True, window=256), T3072, FACTORS),
    'local-2d': ('aft_local', dict(causal=True, **RASTER), T3072, FACTORS),
    'normalized': ('aft_local_learned', dict(causal=True, window=256), T3072, FACTORS),
    'window': ('aft_local_hard', RASTER, T3072, ()),
    'conv': ('aft_conv', dict(grid=(14, 14)), (8, 196, 384), ((384, 11, 11),)),
    'conv-causal': ('aft_conv', dict(grid=(1024,), causal=True), (2, 1024, 256), ((256, 31),)),
}


@pytest.fixture(autouse=True)
def compiling(monkeypatch):
    monkeypatch.setattr(torch.compiler, 'is_compiling', lambda: True)


# The safe paths of the others use the same operations; their graphs grow with the length. Fast
# paths of AFT-full, AFT-local-learned and AFT-local on a line are compiled for bfloat16 below.
SHORT = {
    'full-safe': ('aft_full', dict(causal=True), (8, 10, 192), ((10, 10),)),
    'local-safe': ('aft_local', dict(causal=True, window=24), (2, 96, 256), ((96, 64),) * 2),
}
PATHS = [(case, 'fast') for case in CASES if case not in ('full', 'local', 'normalized')]
PATHS += [(case, 'safe') for case in SHORT]


@pytest.mark.parametrize(
    'case, path',
    nightly(PATHS, lambda case, path: case not in ('simple', 'relu', 'conv-causal')),
)
def test_inductor_writes_forward_and_backward_for_cuda(case, path, monkeypatch):
    op, options, tokens, biases = (CASES | SHORT)[case]

    def branch(condition, fast, safe, operands):
        return (fast if path == 'fast' else safe)(*operands)

    # Nested graphs are only lowered when they are compiled.
    monkeypatch.setattr(torch, 'cond', branch)

    def step(*inputs):
        leaves = [x.detach().requires_grad_() for x in inputs]
        output = getattr(ops, op)(*leaves, **options)
        return output, *torch.autograd.grad(output.sum(), leaves)

    source = source_of(step, tokens, tokens, tokens, *biases, dtype=torch.float32)
    assert 'triton_heuristics' in source


@pytest.mark.parametrize('training, launches', [(False, 1), (True, 3)])
def test_causal_simple_is_one_scan_per_direction(training, launches, monkeypatch):
    monkeypatch.setattr(simple, 'is_one_scan', lambda key: True)  # traced on the CPU

    def step(*inputs):
        leaves = [x.detach().requires_grad_(training) for x in inputs]
        with torch.set_grad_enabled(training):
            output = ops.aft_simple(*leaves, causal=True)
            return output, *(torch.autograd.grad(output.sum(), leaves) if training else ())

    source = source_of(step, *[T3072] * 3, dtype=torch.bfloat16)
    assert source.count('.run(') == launches
    assert source.count('tl.associative_scan') == 1 + training


def test_few_columns_are_not_one_scan(monkeypatch):
    monkeypatch.setattr(torch.compiler, 'is_dynamo_compiling', lambda: True)
    with pretended_device():
        for columns, expected in ((1023, False), (1024, True)):
            key = torch.empty(1, 300, columns, device='cuda')
            assert simple.is_one_scan(key) is expected
    assert not simple.is_one_scan(torch.empty(1, 300, 1024))


# Number of bfloat16 products without and with a gradient: W with the terms, in two parts if there
# is a gradient, its transpose with two parts, and three for the gradient of W. aft_local_learned
# has one more with the gradient of W alone; aft_conv stacks both parts.
PRODUCTS = {'full': (1, 7), 'local': (1, 7), 'normalized': (2, 12), 'conv': (1, 4)}


def precision():
    return 'bf16x2' if torch.is_grad_enabled() else 'bf16'


@pytest.mark.parametrize(
    'case, mode',
    nightly(
        product(PRODUCTS, ['inference', 'training']),
        lambda case, mode: case != 'conv' and (case, mode) != ('full', 'inference'),
    ),
)
def test_inductor_multiplies_bfloat16_with_float32_sums(case, mode, monkeypatch):
    op, options, tokens, biases = CASES[case]
    training = mode == 'training'
    monkeypatch.setattr(torch, 'cond', lambda condition, fast, safe, operands: fast(*operands))
    # Gradients are traced on the CPU, with the choices of the device.
    for module in (conv, full_local):
        monkeypatch.setattr(module, 'matmul_precision', lambda value: precision())
    monkeypatch.setattr(conv, 'DENSE_DEVICES', ('cpu', 'cuda'))
    monkeypatch.setattr(conv_dense, 'is_applicable', lambda *args: True)

    def step(*inputs):
        if not training:
            with torch.no_grad():
                return (getattr(ops, op)(*inputs, **options),)
        leaves = [x.detach().requires_grad_() for x in inputs]
        output = getattr(ops, op)(*leaves, **options)
        return output, *torch.autograd.grad(output.sum(), leaves)

    source = source_of(step, tokens, tokens, tokens, *biases, dtype=torch.bfloat16)
    assert source.count('extern_kernels.bmm_dtype(') == PRODUCTS[case][training]


@pytest.mark.parametrize('grad', [False, True])
def test_tokens_on_a_device_choose_their_products(grad):
    with pretended_device(), torch.set_grad_enabled(grad):
        value = torch.empty(128, 196, 384, device='cuda', dtype=torch.bfloat16)
        assert bf16_matmul.matmul_precision(value) == precision()
        for other in (value.half(), value.float()):
            assert bf16_matmul.matmul_precision(other) == 'fp32'
        columns = torch.empty(4096, 16 * 512, device='cuda')
        assert len(list(banded_matmul._column_chunks(columns))) == 1
        weight = torch.empty(384, 11, 11, device='cuda')
        assert conv_dense.is_applicable(value, weight, (14, 14), precision())


@pytest.mark.parametrize(
    'case, dtype',
    [(case, torch.bfloat16) for case in ('simple', 'window', 'conv', 'conv-few-heads')]
    + [('conv', torch.float32)],
)
def test_an_evaluation_on_a_device_is_one_graph(case, dtype, monkeypatch):
    """Dynamo traces both branches of each choice; on a CPU other operations are traced."""
    monkeypatch.undo()
    few = ('aft_conv', dict(grid=(32, 32)), (4, 1024, 64), ((16, 11, 11),))
    op, options, tokens, biases = (CASES | {'conv-few-heads': few})[case]
    keys = (*tokens[:2], biases[0][0]) if op == 'aft_conv' else tokens
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    nothing = torch.empty(0, dtype=torch.uint8)
    monkeypatch.setenv('AFT_MM_BACKEND', 'eager')
    monkeypatch.setattr(torch.accelerator, 'is_available', lambda: False)  # it has no streams
    for name in ('get_rng_state', 'set_rng_state'):
        monkeypatch.setattr(torch.cuda, name, lambda *state, **options: nothing)
    torch.compiler.reset()
    with pretended_device(), torch.no_grad():
        inputs = [
            torch.empty(shape, device='cuda', dtype=dtype) for shape in (tokens, keys, tokens)
        ]
        inputs += [torch.empty(shape, device='cuda') for shape in biases]
        compiled = torch.compile(
            partial(getattr(ops, op), **options), fullgraph=True, dynamic=False, backend=backend
        )
        assert compiled(*inputs).shape == tokens
    assert len(graphs) == 1


# Launches and products of an evaluation with a known form: bfloat16 products on small grids,
# convolutions on large ones.
@pytest.mark.parametrize(
    'products, form',
    nightly(
        product(['convolved', 'dense'], ['difference', 'additive', 'exact']),
        [('convolved', 'difference'), ('dense', 'additive'), ('dense', 'exact')],
    ),
)
def test_evaluation_of_conv_has_no_choice(products, form, monkeypatch):
    op, options, tokens, biases = CASES['conv']
    is_dense = products == 'dense'
    monkeypatch.setattr(torch, 'cond', None)
    monkeypatch.setattr(conv, 'matmul_precision', lambda value: 'bf16')
    monkeypatch.setattr(conv, 'DENSE_DEVICES', ('cpu', 'cuda'))
    monkeypatch.setattr(conv_dense, 'is_applicable', lambda *args: is_dense)

    def step(*inputs):
        with torch.no_grad():
            plan = ops.ConvPlan(inputs[3], form=form)
            return (getattr(ops, op)(*inputs[:3], plan, **options),)

    source = source_of(step, tokens, tokens, tokens, *biases, dtype=torch.bfloat16)
    multiplied = is_dense and form != 'exact'
    assert source.count('extern_kernels.bmm_dtype(') == multiplied
    assert source.count('extern_kernels.convolution(') == 2 * (not is_dense and form != 'exact')
    assert ('repeat_conv_unless_exact' in source) == (form != 'exact')
    assert ('exact_conv_mean' in source) == (form == 'exact')
