"""Compiled ops at changing sizes, and recorded paths of several threads and nested recordings."""

import threading
from types import SimpleNamespace

import pytest
import torch
from mmengine.registry import MODELS
from torch import nn
from torch._inductor.async_compile import AsyncCompile

from aft_mm import ops
from aft_mm.engine import CompileHook
from aft_mm.ops.export_paths import record_paths, replay_paths

from ..helpers import nightly

pytestmark = [pytest.mark.adversarial, pytest.mark.slow]


def parameters(op, grid):
    tokens = torch.Size(grid).numel()
    if op == 'aft_full':
        return [torch.randn(tokens, tokens)], {}
    if op in ('aft_local', 'aft_local_learned'):
        return [torch.randn(tokens, 2), torch.randn(tokens, 2)], dict(window=3, grid=grid)
    if op == 'aft_conv':
        return [torch.randn(2, *[3] * len(grid))], dict(grid=grid)
    return [], dict(window=2, grid=grid) if op == 'aft_local_hard' else {}


OPS = ['aft_simple', 'aft_full', 'aft_local', 'aft_conv', 'aft_local_hard', 'aft_local_learned']
SIZES = [(op, True, None) for op in OPS] + [('aft_simple', True, False), ('aft_conv', True, False)]
SIZES += [('aft_conv', False, None), ('aft_local_hard', False, None)]


FIRST = 'aft_simple', 'aft_conv'


@pytest.mark.parametrize(
    'op, causal, dynamic',
    # With dynamic=False each size is compiled as the only one.
    nightly(SIZES, lambda op, causal, dynamic: dynamic is False or causal and op not in FIRST),
)
def test_sizes_that_change(op, causal, dynamic):
    torch._dynamo.reset()
    function = getattr(ops, op)
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend='eager')
    for grid in [(4, 3), (3, 5)]:
        biases, options = parameters(op, grid)
        heads = 2 if op == 'aft_conv' else 4
        tokens = torch.Size(grid).numel()
        inputs = [torch.randn(2, tokens, channels) for channels in (4, heads, 4)] + biases
        inputs = [x.requires_grad_(causal) for x in inputs]
        got = compiled(*inputs, causal=causal, **options)
        torch.testing.assert_close(
            got, function(*inputs, causal=causal, **options), rtol=1e-4, atol=1e-5
        )
        if causal:
            slopes = torch.autograd.grad(got.square().sum(), inputs, allow_unused=True)
            assert all(slope is None or slope.isfinite().all() for slope in slopes)


@pytest.mark.nightly
def test_inductor_takes_a_causal_convolution_on_a_picture(monkeypatch):
    """The C++ code is written but not compiled, which takes half a minute; the output is empty."""
    monkeypatch.setenv('AFT_MM_BACKEND', 'eager')  # the loops are one node
    torch._dynamo.reset()
    sources = []
    monkeypatch.setattr(
        AsyncCompile,
        'cpp_pybinding',
        lambda self, types, source: sources.append(source) or (lambda *args: None),
    )
    inputs = [torch.randn(2, 20, 4), torch.randn(2, 20, 2), torch.randn(2, 20, 4)]
    inputs.append(torch.randn(2, 3, 3))
    options = {'cpp.vec_isa_ok': True}  # otherwise programs are compiled to find out
    compiled = torch.compile(ops.aft_conv, fullgraph=True, dynamic=False, options=options)
    with torch.compiler.config.patch(force_disable_caches=True):
        assert compiled(*inputs, grid=(5, 4), causal=True).shape == (2, 20, 4)
    assert len(sources) > 2


def test_the_compile_hook_makes_a_graph_per_size():
    torch._dynamo.reset()
    model = nn.Module()
    model.backbone = MODELS.build(
        dict(
            type='aft_mm.AFTViT',
            arch=dict(embed_dims=8, num_layers=1),
            img_size=8,
            patch_size=4,
            token_mixer=dict(type='aft_mm.AFTSimple'),
        )
    )
    sizes = [torch.ones(1, 3, 4 * n, 8) for n in range(1, 5)]
    expected = [model.backbone(x)[0] for x in sizes]
    # torch gives up after 8 sizes, here after 2.
    with torch._dynamo.config.patch(cache_size_limit=2, accumulated_cache_size_limit=2):
        CompileHook(backend='eager').before_run(SimpleNamespace(model=model))
        for x, want in zip(sizes, expected, strict=True):
            torch.testing.assert_close(model.backbone(x)[0], want)


def run(spread):
    x = torch.linspace(0, spread, 8)[None, :, None].expand(1, 8, 2)
    return ops.aft_simple(x, x, x, causal=True)


def test_threads_record_independently():
    mixed, expected = [], run(1.0)

    def record():
        with record_paths() as paths:
            for _ in range(40):
                run(1.0)
        mixed.append(len(paths) != 40)

    def repeat():
        with replay_paths([True, False]):
            for _ in range(40):
                run(1.0)
        mixed.append(False)

    threads = [threading.Thread(target=call) for call in (record, repeat) * 4]
    for thread in threads:
        thread.start()
    for _ in range(40):  # neither recorded nor replayed
        torch.testing.assert_close(run(1.0), expected)
    for thread in threads:
        thread.join()
    assert mixed == [False] * 8


def test_nested_recordings():
    with record_paths() as outer:
        run(1.0)
        with record_paths() as inner:
            run(1.0)
        run(1.0)
    assert len(inner) == 1 and len(outer) == 3
    with replay_paths([True]):
        with replay_paths([False, False]):
            run(1.0)
            run(1.0)
        run(1.0)


def test_a_run_without_decisions_takes_none():
    with pytest.raises(RuntimeError, match='got no paths, but the run chose one'):
        with replay_paths([]):
            run(1.0)
