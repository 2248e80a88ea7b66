"""Steps on fixed buffers, as a CUDA graph, and compiled."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from aft_mm.layers.block import BlockState
from aft_mm.models.decoders import DecoderState
from aft_mm.models.decoding import step_graph
from aft_mm.models.decoding.step_graph import (
    CapturedSteps,
    CompiledSteps,
    PlainSteps,
    StaticSteps,
    leaves,
    make_steps,
)
from aft_mm.registry import MODELS

from ..helpers import nightly
from .sequence_models import MIXERS, D, all_mixers, decoder, decoder_config, mixer, model, tokens

GUMBEL = dict(type='aft_mm.AFTConv', num_heads=4, kernel_size=3, sparsity='gumbel')
FREE = dict(type='aft_mm.AFTLocal', window=3, rank=None)
MIXINGS = {name: mixer(name) for name in MIXERS}
# Mixers whose state consists of tensors only.
FIXED = {name: mixing for name, mixing in MIXINGS.items() if name != 'SoftmaxAttention'}
CROSS = {
    'softmax': dict(type='aft_mm.SoftmaxAttention', num_heads=3),
    'biased': dict(type='aft_mm.AFTFull', rank=None, grid=(40,), source_grid=(5,)),
}
# One mixer for each kind of step, since tracing takes a second.
KINDS = (
    'AFTFull',
    'AFTLocal',
    'AFTSimple',
    'AFTConv',
    'AFTLocalHard',
    'LinearAttention',
    'LSHAttention',
)
# Mixers whose steps depend on rows and columns.
ON_GRIDS = ('aft_mm.AFTConv', 'aft_mm.AFTLocalHard')
ALL_FIXED = all_mixers('SoftmaxAttention')
every_grid = pytest.mark.parametrize('grid', [(12,), (2, 6)], ids=str)


def steps_of(monkeypatch, kind) -> list:
    made = []

    def make(step, token, hidden, state, count, compiled):
        made.append(kind(step, token, hidden, state))
        return made[-1]

    monkeypatch.setattr('aft_mm.models.decoding.generation.make_steps', make)
    return made


@every_grid
def test_fixed_buffers_give_the_same_tokens(grid, monkeypatch):
    net = model(**ALL_FIXED, grid=grid)
    start = [tokens(length) for length in (5, 1, 9)]
    expected = net.generate(12, start, seed=1)
    made = steps_of(monkeypatch, StaticSteps)
    assert torch.equal(net.generate(12, start, seed=1), expected)
    assert len(made) == 1


def test_fixed_buffers_keep_their_storage():
    body, x = decoder(**ALL_FIXED, grid=(12,)), tokens(3, 12)
    lengths = torch.tensor([4, 0, 7])
    hidden, state = body.prefill(x[:, :7], lengths)
    steps = StaticSteps(body.step, x[:, 0], hidden, state)

    def places():
        parts = (steps.token, steps.hidden, *leaves(steps.state))
        return [part.data_ptr() for part in parts if part.numel()]

    before = places()
    assert len(set(before)) == len(before)
    values = [[part.clone() for part in leaves(block)] for block in steps.state.blocks]
    first = steps(x[:, 1]).clone()
    assert not torch.equal(steps(x[:, 2]), first) and places() == before
    assert torch.equal(steps.state.position, lengths + 2)
    for before, block in zip(values, steps.state.blocks, strict=True):
        assert any(not torch.equal(a, b) for a, b in zip(before, leaves(block), strict=True))


@pytest.mark.parametrize('cross', CROSS.values(), ids=CROSS)
def test_steps_on_fixed_buffers_read_the_memory(cross):
    body, x = decoder(cross_mixer=cross, grid=(12,)), tokens(2, 12)
    memory, mask = torch.randn(2, 5, D), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    expected = body(x, memory, mask)
    hidden, state = body.prefill(x[:, :3], torch.tensor([3, 3]), memory, mask)
    steps = StaticSteps(body.step, x[:, 0], hidden, state)
    for t in range(3, 11):
        torch.testing.assert_close(steps(x[:, t]), expected[:, t + 1], atol=1e-5, rtol=1e-4)


@pytest.fixture
def traced(monkeypatch):
    torch._dynamo.reset()
    counter = CompileCounter()
    advance = torch.compile(
        step_graph._advance_in_place, fullgraph=True, dynamic=False, backend=counter
    )
    monkeypatch.setattr(step_graph, '_compiled_advance', lambda: advance)
    return counter


@pytest.mark.parametrize('name', nightly(KINDS, lambda name: name not in ('AFTConv', 'AFTFull')))
def test_one_compiled_graph_is_used_for_all_positions_and_weights(name, traced):
    mixing = FIXED[name]
    for seed in (1, 2):
        net = model(token_mixer=mixing, grid=(2, 6) if mixing['type'] in ON_GRIDS else (12,))
        before = {name: x.clone() for name, x in net.state_dict().items()}
        expected = net.generate(12, batch_size=3, seed=seed)
        assert torch.equal(net.generate(12, batch_size=3, seed=seed, compiled=True), expected)
        after = net.state_dict()
        assert list(after) == list(before)
        for name, x in after.items():
            assert torch.equal(x, before[name]) and x.stride() == before[name].stride()
    assert traced.frame_count == 1


def test_prompts_of_different_lengths_are_compiled(traced):
    net = model(token_mixer=FIXED['AFTLocal'], grid=(12,))
    start = [tokens(length) for length in (5, 1, 9)]
    expected = net.generate(12, start, seed=1)
    assert torch.equal(net.generate(12, start, seed=1, compiled=True), expected)
    assert traced.frame_count == 1


def test_growing_states_are_not_compiled(traced):
    net = model(token_mixer=MIXINGS['SoftmaxAttention'], grid=(12,))
    net.generate(12, seed=1, compiled=True)
    net.generate(12, seed=1, compiled=True, use_state=False)
    assert traced.frame_count == 0


def test_compiled_steps_give_the_same_hidden_vectors(monkeypatch):
    # Code generation takes half a minute; benchmark_sampling.py checks it.
    torch._dynamo.reset()
    advance = torch.compile(step_graph._advance_in_place, fullgraph=True, backend='aot_eager')
    monkeypatch.setattr(step_graph, '_compiled_advance', lambda: advance)
    body = decoder(token_mixer=FIXED['AFTSimple'], num_layers=1, grid=(40,))
    x, lengths = tokens(2, 40), torch.tensor([5, 1])
    hidden, state = body.prefill(x[:, :5], lengths)
    compiled = CompiledSteps(body.step, x[:, 0], hidden, state)
    assert compiled.seconds > 0 and torch.equal(compiled.state.position, lengths)
    plain = PlainSteps(body.step, body.prefill(x[:, :5], lengths)[1])
    for t in range(5, 20):
        torch.testing.assert_close(compiled(x[:, t]), plain(x[:, t]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('columns', [False, True])
def test_the_step_layout_changes_no_result(columns):
    body, x = decoder(**all_mixers(), grid=(12,)).double(), tokens(3, 12)
    lengths = torch.tensor([4, 0, 7])

    def rows():
        steps = PlainSteps(body.step, body.prefill(x[:, :7], lengths)[1])
        return torch.stack([steps(x[:, t]) for t in range(4)])

    expected, strides = rows(), [p.stride() for p in body.parameters()]
    with step_graph.step_layout(body, columns):
        torch.testing.assert_close(rows(), expected)
        assert ([p.stride() for p in body.parameters()] == strides) != columns
    assert torch.equal(rows(), expected) and [p.stride() for p in body.parameters()] == strides


def test_weights_are_restored_after_an_error_and_fused_again():
    body, x = decoder(token_mixer=FIXED['AFTLocal']), tokens(3, 1)[:, 0]
    mixer, strides = body.layers[0].token_mixer, [p.stride() for p in body.parameters()]
    with pytest.raises(KeyError), step_graph.step_layout(body, True):
        raise KeyError
    assert [p.stride() for p in body.parameters()] == strides

    def step():
        return body.step(x, body.prefill(x[:, None], torch.tensor([1, 1, 1]))[1])[0]

    before = step()
    nn.init.normal_(mixer.key.weight)
    assert not torch.allclose(step(), before)
    seen = []
    mixer.key.register_forward_hook(lambda *call: seen.append(call))
    with step_graph.step_layout(body, False):
        seen.clear()
        mixer.step(torch.randn(2, D), mixer.init_state(2))
    assert len(seen) == 1  # a projection with a hook is not fused


def test_a_state_copy_shares_no_memory():
    body, x = decoder(token_mixer=FIXED['AFTFull']), tokens(2, 4)
    _, state = body.prefill(x, torch.tensor([4, 2]))
    copy = step_graph.copy_state(state)
    assert type(copy) is type(state) and type(copy.blocks[0]) is type(state.blocks[0])
    pairs = list(zip(leaves(state), leaves(copy), strict=True))
    assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in pairs)


def test_graphs_need_many_steps_and_a_fixed_state(monkeypatch):
    states = {
        name: decoder(token_mixer=mixing, grid=(12,)).prefill(tokens(2, 3), torch.tensor([3, 1]))[1]
        for name, mixing in MIXINGS.items()
    }
    monkeypatch.setattr(step_graph, 'FEWEST_STEPS', 3)
    assert {name for name, state in states.items() if step_graph.graph_pays(state, 3)} == set(FIXED)
    assert not any(step_graph.graph_pays(state, 2) for state in states.values())
    made = make_steps(None, torch.zeros(2), None, states['AFTSimple'], 3)
    assert type(made) is PlainSteps  # on a CPU


STEPPED = {
    **{name: (mixing, None) for name, mixing in MIXINGS.items()},
    'AFTConv-gumbel': (GUMBEL, None),
    'AFTLocal-free': (FREE, None),
    **{f'AFTSimple-{name}': (MIXINGS['AFTSimple'], cross) for name, cross in CROSS.items()},
}
stepped = pytest.mark.parametrize('mixing, cross', STEPPED.values(), ids=STEPPED)


@stepped
def test_steps_do_not_synchronise(mixing, cross, monkeypatch):
    """Fake tensors have no values, so reading one would raise."""
    # It reads values since torch 2.12.
    monkeypatch.setattr(nn.init, 'trunc_normal_', lambda tensor, **options: tensor)
    with FakeTensorMode(), torch.device('cuda'):
        config = decoder_config(token_mixer=mixing, cross_mixer=cross, grid=(12,))
        body = MODELS.build(config).eval()
        mask = torch.ones(2, 5, dtype=torch.bool)
        blocks = [
            BlockState(
                layer.token_mixer.init_state(2),
                cross and layer.cross_mixer.project_memory(torch.zeros(2, 5, D), mask),
            )
            for layer in body.layers
        ]
        state = DecoderState(blocks, torch.zeros(2, dtype=torch.long))
        for _ in range(2):
            state.hold(9)
            hidden, state = body.step(torch.zeros(2, dtype=torch.long), state)
        assert hidden.shape == (2, D) and hidden.device.type == 'cuda'
        with pytest.raises(DataDependentOutputException):
            bool(hidden.any())


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')


@pytest.mark.cuda
@needs_cuda
@stepped
def test_a_cuda_graph_equals_plain_steps(mixing, cross):
    if mixing is MIXINGS['SoftmaxAttention']:
        pytest.skip('its state grows')
    body, x = decoder(token_mixer=mixing, cross_mixer=cross, grid=(40,)).cuda(), tokens(3, 40)
    x, lengths = x.cuda(), torch.tensor([5, 1, 9]).cuda()
    memory = None if cross is None else torch.randn(3, 5, D).cuda()
    mask = None if cross is None else torch.rand(3, 5).cuda() < 0.7

    def rows(kind):
        hidden, state = body.prefill(x[:, :9], lengths, memory, mask)
        start = (x[:, 0], hidden) if kind is CapturedSteps else ()
        steps = kind(body.step, *start, state)
        return torch.stack([steps(x[:, t]).clone() for t in range(9, 30)])

    torch.testing.assert_close(rows(CapturedSteps), rows(PlainSteps), atol=0, rtol=0)


@pytest.mark.cuda
@needs_cuda
def test_generation_replays_a_graph(monkeypatch):
    net, start = model(grid=(40,)).cuda(), [tokens(length) for length in (5, 1, 9)]
    expected = net.generate(40, start, seed=1, use_state=False)
    replays, replay = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, 'replay', lambda self: replays.append(1) or replay(self)
    )
    assert torch.equal(net.generate(40, start, seed=1), expected) and len(replays) == 38
