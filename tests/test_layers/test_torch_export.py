"""torch.export of a layer as torch's own documentation does it, with and without gradients."""

import pytest
import torch

from aft_mm.layers import AFTConv, AFTDecay, AFTFull, AFTLocal, AFTSimple

from ..helpers import each, nightly

LAYERS = {
    'conv': lambda: AFTConv(12, num_heads=3, kernel_size=3, grid=(4, 5)),
    'conv-window': lambda: AFTConv(
        12, num_heads=3, kernel_size=3, grid=(4, 5), global_connectivity=False
    ),
    'conv-causal': lambda: AFTConv(12, num_heads=3, kernel_size=3, grid=(20,), causal=True),
    'full': lambda: AFTFull(12, rank=4, grid=(4, 5)),
    'full-longer': lambda: AFTFull(12, rank=4, grid=(9,), longer='nearest', causal=True),
    'full-log': lambda: AFTFull(12, grid=(9,), longer='log', num_heads=3),
    'local': lambda: AFTLocal(12, rank=4, window=3, grid=(4, 5)),
    'local-causal': lambda: AFTLocal(12, window=3, rank=None, grid=(20,), causal=True),
    'simple': lambda: AFTSimple(12, grid=(4, 5)),
    'simple-causal': lambda: AFTSimple(12, causal=True),
    'decay': lambda: AFTDecay(12),
    'decay-causal': lambda: AFTDecay(12, causal=True),
}


@pytest.mark.parametrize(
    'name',
    nightly(LAYERS, lambda name: name not in ('conv', 'decay-causal')),
)
def test_a_layer_is_exported_with_and_without_gradients(name):
    layer, x = LAYERS[name]().eval(), torch.randn(2, 20, 12)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            graph = torch.export.export(layer, (x,)).module()
        with torch.no_grad():
            for factor in (1, 300):  # keys that only the safe path can sum
                torch.testing.assert_close(
                    graph(factor * x), layer(factor * x), atol=1e-5, rtol=1e-4
                )


@each('name', LAYERS)
@torch.no_grad()
def test_the_batch_may_be_dynamic(name):
    layer = LAYERS[name]().eval()
    batch = {0: torch.export.Dim('batch', min=2)}
    program = torch.export.export(
        layer, (torch.randn(2, 20, 12),), dynamic_shapes=(batch,), strict=True
    )
    for size in (3, 200):  # below and above the size from which a CPU reads values
        x = torch.randn(size, 20, 12)
        torch.testing.assert_close(program.module()(x), layer(x), atol=1e-5, rtol=1e-4)
