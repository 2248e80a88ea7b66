"""Linear attention, Performer, Synthesizer, lambda layer, softmax attention, controls."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from aft_mm.layers import (
    DenseSynthesizer,
    DepthwiseConv,
    Identity,
    LambdaLayer,
    LinearAttention,
    PerformerAttention,
    Pooling,
    SoftmaxAttention,
)

from ..helpers import nightly
from .dense_attention import HEADS, D, heads, joined, randomize
from .mixer_cases import build


@pytest.mark.parametrize('causal', [False, True])
def test_linear_attention_weights_are_products_of_features(causal):
    mixer = randomize(LinearAttention(D, HEADS, causal=causal))
    x = torch.randn(2, 9, D, dtype=torch.float64)
    query, key, value = (heads(layer(x)) for layer in (mixer.query, mixer.key, mixer.value))
    weights = (F.elu(query) + 1) @ (F.elu(key) + 1).mT
    weights = weights.tril() if causal else weights
    expected = mixer.proj(joined(weights / weights.sum(-1, keepdim=True) @ value))
    torch.testing.assert_close(mixer(x), expected)


@pytest.mark.parametrize('causal', [False, True])
def test_performer_approximates_softmax_attention(causal):
    """The error decreases with the number of features."""
    softmax = SoftmaxAttention(D, HEADS, causal=causal)
    x = torch.randn(4, 30, D)
    expected, errors = softmax(x), []
    for features in (16, 65536):
        mixer = PerformerAttention(D, HEADS, num_features=features, causal=causal)
        assert not mixer.load_state_dict(softmax.state_dict(), strict=False).unexpected_keys
        errors.append((mixer(x) - expected).norm() / (expected - expected.mean(1, True)).norm())
    assert errors[1] < 0.1 and errors[1] < errors[0] / 5


def test_performer_features_are_orthogonal_with_norms_of_gaussians():
    mixer = PerformerAttention(4096, 64, num_features=160)
    rows = mixer.projection
    for block in rows.split(64):
        product = block @ block.T
        torch.testing.assert_close(product, product.diag().diag(), atol=1e-3, rtol=0)
    assert abs(rows.square().sum(1).mean() - 64) < 3 and rows.norm(dim=1).std() > 0.3


def test_large_keys_keep_performer_finite_and_causal():
    mixer = PerformerAttention(D, HEADS, num_features=16, causal=True)
    x = torch.randn(1, 20, D, requires_grad=True)
    before = mixer(x)
    late = torch.cat((x[:, :12], 1e6 * x[:, 12:]), 1)
    after = mixer(late)
    assert torch.equal(before[:, :12], after[:, :12]) and after.isfinite().all()
    (gradient,) = torch.autograd.grad(after.sum(), x)
    assert gradient.isfinite().all()


def train(mixer, x, updates, passes=1, recompute=False):
    optimizer = torch.optim.AdamW(mixer.parameters())
    projections = [mixer.projection.clone()]
    for _ in range(updates):
        optimizer.zero_grad()
        for _ in range(passes):
            y = checkpoint(mixer, x, use_reentrant=False) if recompute else mixer(x)
            y.square().sum().backward()
        optimizer.step()
        projections.append(mixer.projection.clone())
    return [bool((a != b).any()) for a, b in zip(projections, projections[1:], strict=False)]


def test_features_are_sampled_again_after_iterations_alike_in_every_process():
    mixer, x = PerformerAttention(D, HEADS, num_features=8, redraw=2), torch.randn(2, 5, D)
    twin = copy.deepcopy(mixer)
    first = mixer.projection.clone()
    # The pass after two iterations is the first with new features.
    assert train(mixer, x, 6) == [False, False, True, False, True, False]
    # Accumulated passes and recomputed blocks of one iteration use the same features.
    assert train(twin, x, 6, passes=3, recompute=True) == [False, False, True, False, True, False]
    assert torch.equal(mixer.projection, twin.projection)

    other = PerformerAttention(D, HEADS, num_features=8, redraw=2)
    assert (other.projection != first).any()
    other.load_state_dict(mixer.state_dict())
    torch.testing.assert_close(other.eval()(x), mixer.eval()(x))
    for resumed in (mixer, other):
        train(resumed.train(), x, 3)
    assert torch.equal(other.projection, mixer.projection) and other.iterations == 9

    fixed = PerformerAttention(D, HEADS, num_features=8)
    assert not any(train(fixed, x, 4))


@pytest.mark.parametrize('causal', [False, True])
def test_a_synthesizer_predicts_weights_from_the_token_alone(causal):
    mixer = randomize(DenseSynthesizer(D, HEADS, grid=(9,), causal=causal))
    x = torch.randn(2, 7, D, dtype=torch.float64)
    hidden = heads(mixer.query(x).relu())
    bias = mixer.bias.view(HEADS, -1)
    logits = [hidden[:, h] @ mixer.weight[h, :, :7] + bias[h, :7] for h in range(HEADS)]
    logits = torch.stack(logits, 1)
    if causal:
        logits = logits.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf)
    expected = mixer.proj(joined(logits.softmax(-1) @ heads(mixer.value(x))))
    torch.testing.assert_close(mixer(x), expected)


@pytest.mark.parametrize('masked', [False, True])
@pytest.mark.parametrize('grid', [(7,), (3, 4), (2, 3, 2)], ids=str)
def test_the_lambda_layer_follows_its_formula(grid, masked):
    """Entry by entry, in training mode, where BatchNorm uses the visible tokens."""
    mixer = randomize(LambdaLayer(D, HEADS, key_dims=5, grid=tuple(n + 1 for n in grid)))
    tokens = torch.Size(grid).numel()
    x = torch.randn(2, tokens, D, dtype=torch.float64)
    keep = torch.rand(2, tokens) < 0.7 if masked else torch.ones(2, tokens, dtype=torch.bool)

    def normed(layer, norm):
        y = layer(x)
        visible = y[keep]
        y = (y - visible.mean(0)) / (visible.var(0, correction=0) + norm.eps).sqrt()
        return y * norm.weight + norm.bias

    query, key = normed(mixer.query, mixer.query_norm), normed(mixer.key, mixer.key_norm)
    value = mixer.value(x)
    content = key.masked_fill(~keep[..., None], -torch.inf).softmax(1)
    places = torch.cartesian_prod(*map(torch.arange, grid)).view(tokens, -1)
    rows = torch.empty(2, tokens, HEADS, D // HEADS, dtype=torch.float64)
    for b in range(2):
        for t in range(tokens):
            function = torch.zeros(5, D // HEADS, dtype=torch.float64)
            for s in keep[b].nonzero().flatten():
                offset = places[s] - places[t] + torch.tensor(grid)
                embedding = mixer.pos_embed[tuple(offset)]
                function += torch.outer(content[b, s] + embedding, value[b, s])
            rows[b, t] = query[b, t].view(HEADS, 5) @ function
    got = mixer(x, grid=grid, key_mask=keep if masked else None)
    torch.testing.assert_close(got[keep], mixer.proj(rows.flatten(2))[keep])


def weight_of_neighbour(mixer, channel, offset):
    """Weight of the value at `offset` (t' − t per dimension) in `channel`, by the definitions."""
    far = max(map(abs, offset))
    if isinstance(mixer, Identity):
        return float(far == 0)
    if isinstance(mixer, Pooling):
        return float(far <= 1)
    if isinstance(mixer, DepthwiseConv):
        return mixer.weight[(channel, *(1 + n for n in offset))].item() if far <= 1 else 0.0
    neighbours = [(0,) * len(offset)]
    for axis in reversed(range(len(offset))):
        for step in (-1,) if mixer.causal else (-1, 1):
            neighbours.append(tuple(step * (n == axis) for n in range(len(offset))))
    return float(offset == neighbours[channel * len(neighbours) // D])


@pytest.mark.parametrize('causal', [False, True], ids=['all', 'causal'])
@pytest.mark.parametrize('grid', [(9,), (3, 4)], ids=str)
@pytest.mark.parametrize('name', ['DepthwiseConv', 'Identity', 'Pooling', 'TokenShift'])
def test_controls_are_gated_sums_with_fixed_weights(name, grid, causal):
    mixer = build(name, grid, causal=causal).double()
    x = torch.randn(2, torch.Size(grid).numel(), D, dtype=torch.float64)
    places = list(itertools.product(*map(range, grid)))
    weights = torch.zeros(D, len(places), len(places), dtype=torch.float64)
    for (t, target), (s, source) in itertools.product(enumerate(places), repeat=2):
        if not causal or s <= t:
            offset = tuple(b - a for a, b in zip(target, source, strict=True))
            weights[:, t, s] = torch.tensor(
                [weight_of_neighbour(mixer, channel, offset) for channel in range(D)]
            )
    if name == 'Pooling':
        weights = weights / weights.sum(-1, keepdim=True)
    mixed = torch.einsum('cts,bsc->btc', weights, mixer.value(x))
    torch.testing.assert_close(mixer(x), mixer.proj(mixer.query(x).sigmoid() * mixed))


EXPORTED = ['LinearAttention', 'PerformerAttention', 'DenseSynthesizer', 'LambdaLayer']
EXPORTED += ['StridedAttention', 'StridedAttention-fixed', 'LSHAttention']


@pytest.mark.parametrize(
    'name', nightly(EXPORTED, lambda name: name not in ('LinearAttention', 'LSHAttention'))
)
def test_comparators_export_and_compile_as_one_graph(name):
    mixer, x = build(name, (15,), causal=name != 'LambdaLayer').eval(), torch.randn(2, 15, D)
    with torch.no_grad():
        exported = torch.export.export(mixer, (x,)).module()
    torch.testing.assert_close(exported(x), mixer(x))
    torch.compiler.reset()
    compiled = torch.compile(mixer, fullgraph=True, backend='eager')
    for key_mask in (None, torch.arange(15) < torch.tensor([[15], [6]])):
        torch.testing.assert_close(compiled(x, key_mask=key_mask), mixer(x, key_mask=key_mask))


def test_stateless_softmax_attention_stores_tokens_not_keys():
    mixer = randomize(SoftmaxAttention(D, HEADS, grid=(9,), causal=True, stateful=False))
    x = torch.randn(2, 9, D, dtype=torch.float64)
    state, cached = mixer.init_state(2), SoftmaxAttention(D, HEADS, causal=True).double()
    cached.load_state_dict(mixer.state_dict())
    cache, projected = cached.init_state(2), []
    mixer.key.register_forward_hook(lambda *call: projected.append(call[2].shape[1]))
    for t in range(9):
        y_t, state = mixer.step(x[:, t], state)
        expected, cache = cached.step(x[:, t], cache)
        torch.testing.assert_close(y_t, expected)
    assert projected == list(range(1, 10))
    assert torch.equal(state.table.rows[0], x)


@pytest.mark.parametrize('causal', [False, True], ids=['all', 'causal'])
def test_softmax_attention_equals_torch(causal):
    mixer, x = build('SoftmaxAttention', None, causal=causal), torch.randn(2, 7, D)
    oracle = nn.MultiheadAttention(D, 3, batch_first=True)
    for part in ('weight', 'bias'):
        names = ('query', 'key', 'value')
        joined = torch.cat([getattr(getattr(mixer, name), part) for name in names])
        getattr(oracle, f'in_proj_{part}').data = joined.detach()
    oracle.out_proj.load_state_dict(mixer.proj.state_dict())
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1) if causal else None
    expected, _ = oracle(x, x, x, key_padding_mask=~mask, attn_mask=hidden)
    y = mixer(x, key_mask=mask)
    torch.testing.assert_close(y[0], expected[0])
    torch.testing.assert_close(y[1, :4], expected[1, :4])


def test_the_cache_grows_more_than_once():
    mixer = build('SoftmaxAttention', None, causal=True)
    x, lengths, each = torch.randn(2, 140, D), torch.tensor([3, 40]), torch.arange(2)
    expected = mixer(x)
    _, state = mixer.prefill(x[:, :40], lengths)
    rooms = {state.key.shape[2]}
    for n in range(100):
        y_t, state = mixer.step(x[each, lengths + n], state)
        torch.testing.assert_close(y_t, expected[each, lengths + n], atol=1e-5, rtol=1e-4)
        rooms.add(state.key.shape[2])
    assert len(rooms) == 3
