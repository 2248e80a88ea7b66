"""Query, key and value from one product in training, and its two products backward."""

import copy
import re

import pytest
import torch
from torch import nn

from aft_mm.layers import AFTConv
from aft_mm.layers.projections import (
    FusedLinear,
    fuse_linear,
    project_channel_major,
    project_tokens,
)
from aft_mm.ops import aft_conv_joined, dispatch
from aft_mm.ops.cuda import nvrtc

from ..helpers import OperatorLog
from ..inductor_offline import source_of
from ..test_ops.cuda_emulation import emulated, emulation_folder  # noqa: F401 - fixtures

BF16 = torch.bfloat16
PRODUCTS = {'aten::mm', 'aten::addmm'}
COPIES = {'aten::copy_', 'aten::clone', 'aten::stack', 'aten::cat', 'aten::_to_copy'}
MIXERS = {
    'a key per channel': dict(num_heads=8),
    'no bias': dict(num_heads=8, qkv_bias=False),
    'no query': dict(num_heads=8, query=False),
    'relu, large map': dict(num_heads=8, gate='relu', grid=(3, 18)),
    'causal text': dict(num_heads=8, kernel_size=5, grid=(20,), causal=True),
    'heads': dict(num_heads=2),
}


class ResultLog(OperatorLog):
    """Keeps sizes and addresses of results, too, but not them, which would have to be copied."""

    def __init__(self):
        super().__init__()
        self.results = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(function, types, args, kwargs)
        first = result[0] if isinstance(result, (list, tuple)) else result
        if isinstance(first, torch.Tensor):
            self.results.append((function.name(), first.numel(), first.data_ptr()))
        return result

    def copies(self, least):
        """Return the operators that copied a tensor of `least` numbers or more."""
        return [name for name, size, _ in self.results if name in COPIES and size >= least]

    def find(self, *names):
        """Return size and address of the first result of these operators."""
        return next(result[1:] for result in self.results if result[0] in names)


@pytest.fixture
def channel_major(monkeypatch, emulated):  # noqa: F811
    """The path of CUDA tensors on a CPU; keeps the arguments of the last main kernel."""
    monkeypatch.setattr(dispatch, 'CHANNEL_MAJOR_DEVICES', ('cpu',))
    launch = nvrtc.launch

    def keep(name, macros, kernel, grid, threads, arguments, index):
        launch(name, macros, kernel, grid, threads, arguments, index)
        emulated.arguments = arguments

    monkeypatch.setattr(nvrtc, 'launch', keep)
    return emulated


def build(dtype=BF16, **options):
    mixer = AFTConv(8, **{'kernel_size': 3, 'grid': (4, 6), **options}).to(dtype)
    tokens = 1
    for size in mixer.grid:
        tokens *= size
    return mixer.train(), torch.randn(3, tokens, 8, dtype=dtype, requires_grad=True)


def train(mixer, x, key_mask=None):
    """Return the output and all gradients, and the operators of both directions."""
    mixer.zero_grad()
    x.grad = None
    with ResultLog() as forward:
        output = mixer(x, key_mask=key_mask)
    generator = torch.Generator().manual_seed(1)
    cotangent = torch.randn(output.shape, generator=generator).to(output.dtype)
    with ResultLog() as backward:
        output.backward(cotangent)
    gradients = {name: p.grad for name, p in mixer.named_parameters() if p.grad is not None}
    return dict(gradients, x=x.grad, y=output.detach()), forward, backward


def assert_near(got, expected):
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        error = (got[name].double() - want.double()).norm() / want.double().norm().clamp_min(0.1)
        assert error < 3e-2, (name, error)


def count(log):
    return sum(name in PRODUCTS for name in log.called)


@pytest.mark.parametrize('name', MIXERS)
@pytest.mark.parametrize('masked', [False, True])
def test_one_product_forward_and_two_backward(name, masked, channel_major, monkeypatch):
    mixer, x = build(**MIXERS[name])
    mask = torch.rand(x.shape[:2]) < 0.7 if masked else None
    got, forward, backward = train(mixer, x, mask)
    assert count(forward) == 1 + 1 and count(backward) == 2 + 2  # the output projection has as many
    assert forward.copies(x.numel()) == backward.copies(x.numel()) == []
    # Inside of the op, too, kernels read what the product wrote and write what the next one reads.
    size, qkv = forward.find(*PRODUCTS)
    grads_size, grads = backward.find('aft_mm::cuda_conv_backward')
    arguments, place = channel_major.arguments, 0
    for layer in ('query', 'key', 'value'):
        if getattr(mixer, layer) is not None:
            assert getattr(arguments, layer).data == qkv + 2 * place
            written = arguments.out if layer == 'query' else getattr(arguments, f'grad_{layer}')
            if layer != 'key' or mixer.num_heads == 8:  # else summed over the channels of a head
                assert written.data == grads + 2 * place
            place += getattr(mixer, layer).out_features * x.shape[0] * x.shape[1]
    assert size == grads_size == place
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, 'reference')
    wide = copy.deepcopy(mixer).double()
    expected, *_ = train(wide, x.detach().double().requires_grad_(), mask)
    # The bias of the keys changes nothing, so its gradient is rounding.
    got.pop('key.bias', None), expected.pop('key.bias', None)
    assert_near(got, expected)


def test_checkpoints_of_three_layers_load(channel_major):
    mixer, _ = build(num_heads=8)
    names = {
        f'{layer}.{part}' for layer in ('query', 'key', 'value') for part in ('weight', 'bias')
    }
    state = mixer.state_dict()
    assert names < state.keys()
    other, x = build(num_heads=8)
    other.load_state_dict(state)
    assert torch.equal(other(x), mixer(x))
    optimizer = torch.optim.AdamW(mixer.parameters(), 0.1)
    train(mixer, x)
    optimizer.step()
    assert not torch.equal(mixer.key.weight, other.key.weight)
    # Each layer has a gradient of its own, which others do not change.
    mixer.query.weight.grad.zero_()
    assert mixer.key.weight.grad.any() and mixer.value.weight.grad.any()


def test_autocast_and_accumulated_gradients(channel_major, monkeypatch):
    mixer, x = build(torch.float32, num_heads=8)
    results = []
    for backend in ('cuda', 'eager'):
        monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, backend)
        mixer.zero_grad()
        for part in x.split(1):
            with torch.autocast('cpu', BF16):
                mixer(part).float().square().sum().backward()
        grads = {name: p.grad.clone() for name, p in mixer.named_parameters()}
        grads.pop('key.bias')
        results.append(grads)
    assert all(grad.dtype == torch.float32 for grad in results[0].values())
    assert_near(*results)


def test_compiled_without_graph_break(channel_major):
    mixer, x = build(num_heads=8)
    expected, *_ = train(mixer, x)
    expected = {name: each.clone() for name, each in expected.items()}
    torch._dynamo.reset()
    compiled = torch.compile(mixer, fullgraph=True, backend='aot_eager')
    mixer.zero_grad()
    x.grad = None
    output = compiled(x)
    generator = torch.Generator().manual_seed(1)
    output.backward(torch.randn(output.shape, generator=generator).to(BF16))
    got = {name: p.grad for name, p in mixer.named_parameters()}
    assert 'backward' in channel_major.launched
    assert_near(dict(got, x=x.grad, y=output.detach()), expected)


OTHERS = {
    'hook': lambda mixer: mixer.key.register_forward_hook(lambda *args: None),
    'backward hook': lambda mixer: mixer.key.register_full_backward_hook(lambda *args: None),
    'another layer': lambda mixer: setattr(mixer, 'key', nn.Sequential(mixer.key)),
    'some biases': lambda mixer: setattr(mixer.key, 'bias', None),
    'gate': lambda mixer: setattr(mixer, 'gate', 'silu'),
}


@pytest.mark.parametrize('name', OTHERS)
def test_layers_that_are_not_plain_have_products_of_their_own(name, channel_major):
    mixer, x = build(num_heads=8)
    OTHERS[name](mixer)
    _, forward, _ = train(mixer, x)
    assert count(forward) == 3 + 1


def test_a_backward_hook_of_one_layer_is_called(channel_major):
    mixer, x = build(num_heads=8)
    called = []
    mixer.value.register_full_backward_hook(lambda *args: called.append(1))
    train(mixer, x)
    assert called == [1]


def test_calls_that_no_kernel_serves_are_split(channel_major, monkeypatch):
    """3-d maps, transforms and a device that the backend refuses, to the bits of three tensors."""
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, 'cuda,eager')
    mixer, x = build(num_heads=8, grid=(2, 3, 4), kernel_size=(3, 3, 3))
    got, forward, _ = train(mixer, x)
    assert 'aft_mm::cuda_conv' not in forward.called
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, 'eager')
    expected, forward, _ = train(mixer, x)
    assert count(forward) > 1 + 1
    got.pop('key.bias'), expected.pop('key.bias')
    assert_near(got, expected)


@pytest.mark.parametrize('shape', [(2, 24, 23), (24, 24), (2, 24, 9)])
def test_other_sizes_are_refused(shape):
    with pytest.raises(ValueError, match=r'qkv must be \[B, T, 2D \+ 8\], got \['):
        aft_conv_joined(torch.randn(shape), torch.randn(8, 3, 3), grid=(4, 6))


def test_an_empty_batch(channel_major):
    mixer, _ = build(num_heads=8)
    x = torch.randn(0, 24, 8, dtype=BF16, requires_grad=True)
    got, *_ = train(mixer, x)
    assert got['y'].shape == (0, 24, 8) and (got['key.weight'] == 0).all()


def test_cpu_tensors_take_three_layers():
    """On a CPU nothing changes: the same operators, with gradients."""
    mixer, x = build(torch.float32, num_heads=8)
    _, forward, backward = train(mixer, x)
    assert count(forward) == 3 + 1 and 'aten::cat' not in forward.called
    assert fuse_linear([mixer.query, mixer.key]).weight.requires_grad


def test_inductor_writes_one_product(emulated, monkeypatch):  # noqa: F811
    """Code for CUDA of one training step of the mixer's products and op."""
    pytest.importorskip('triton', reason='Inductor writes Triton source for a GPU')
    monkeypatch.setattr(torch.compiler, 'is_compiling', lambda: True)
    tokens = (4, 196, 64)
    shapes = [tokens, tokens, *((64, 64),) * 4, (64, 11, 11)]

    def step(cotangent, x, *weights):
        leaves = [y.detach().requires_grad_() for y in (x, *weights)]
        fused = FusedLinear(torch.cat(leaves[1:4]), None, [64] * 3)
        qkv = project_channel_major(fused, leaves[0])
        options = dict(grid=(14, 14), global_connectivity=True, causal=False, key_mask=None)
        mixed = aft_conv_joined(qkv, leaves[5], gate='sigmoid', **options)
        layer = FusedLinear(leaves[4], None, [64])
        output = project_tokens(layer, mixed)
        return output, *torch.autograd.grad(output, leaves, cotangent)

    source = source_of(step, *shapes, dtype=BF16)
    assert source.count('aft_mm.cuda_conv_backward.default(') == 1
    assert source.count('extern_kernels.mm(') == 2 + 4
    # Only weights, which are small, are copied.
    pointwise = re.findall(r'triton_\w+\.run\((.*?), stream', source)
    assert not [call for call in pointwise if call.endswith(str(4 * 196 * 64))]
