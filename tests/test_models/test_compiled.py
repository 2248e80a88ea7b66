"""Models compiled for images of any size and for several batches."""

from itertools import product

import pytest
import torch
from torch import nn

from aft_mm.layers import AFTConv, AFTFull
from aft_mm.models import AFTClassifier

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

MIXERS = {
    'conv': dict(type='aft_mm.AFTConv', num_heads=4, kernel_size=5),
    'local': dict(type='aft_mm.AFTLocal', window=3, rank=4),
}
# The size of the learned positions, others, and one that is padded to whole patches.
SHAPES = [(4, 3, 32, 32), (2, 3, 48, 32), (3, 3, 40, 64)]


@pytest.fixture(autouse=True)
def reset():
    torch._dynamo.reset()
    torch.manual_seed(0)


def classifier(mixer):
    arch = dict(embed_dims=16, num_layers=1)
    model = AFTClassifier(arch, mixer, img_size=32, num_classes=3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def check(model, compiled, inputs, autocast, tolerance):
    """Compare outputs and, in training, the gradients of all parameters."""
    results = []
    for run in (compiled, model):
        model.zero_grad()
        with torch.set_grad_enabled(model.training):
            with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
                output = run(inputs)
            if model.training:
                output.float().square().mean().backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        results.append([output.detach(), *([torch.cat(gradients)] if gradients else [])])
    for found, expected in zip(*results, strict=True):
        # Gradients of biases of keys are 0 but for rounding.
        scale = expected.float().abs().max().item()
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * scale)


# A backward pass of open sizes is traced in 20 s.
@pytest.mark.parametrize('mixer, backend', list(product(MIXERS, ['eager', 'aot_eager'])))
def test_training_takes_images_of_any_size(mixer, backend):
    model = classifier(MIXERS[mixer]).train()
    compiled = torch.compile(model, dynamic=True, fullgraph=True, backend=backend)
    for shape in SHAPES:
        check(model, compiled, torch.randn(shape), False, 1e-4)


def test_inductor_compiles_a_classifier_for_any_size():
    model = classifier(MIXERS['conv']).eval()
    compiled = torch.compile(model, dynamic=True, fullgraph=True)
    for shape in SHAPES:
        check(model, compiled, torch.randn(shape), True, 0.1)


# The compiler of C++ takes a second for each of 69 kernels.
def test_inductor_trains():
    model = nn.Sequential(AFTConv(16, 4, 3, grid=(4, 4)), AFTFull(16, 4, grid=(16,))).train()
    compiled = torch.compile(model)
    for batch in (4, 2):
        check(model, compiled, torch.randn(batch, 16, 16), True, 0.1)
