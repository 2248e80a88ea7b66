"""FlaMixer around a stand-in: flash-linear-attention itself needs a GPU.

The stand-in has the interface of ``fla.layers.GatedDeltaNet`` 0.6 and is a causal mean; what is
held here is the contract of a mixer around it, not the library.
"""

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from aft_mm.layers import Block, FlaMixer
from aft_mm.registry import MODELS

D = 12


class CausalMean(nn.Module):
    """The mean of the tokens up to here that are not hidden, projected."""

    def __init__(self, hidden_size=2048, head_dim=256, num_heads=6, layer_idx=None):
        super().__init__()
        self.v_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, use_cache=False):
        shape = hidden_states.shape[:2]
        kept = torch.ones(shape) if attention_mask is None else attention_mask.float()
        assert kept.shape == shape
        value = self.v_proj(hidden_states).masked_fill(kept[..., None] == 0, 0)
        mean = value.cumsum(1) / kept.cumsum(1).clamp(min=1)[..., None]
        return self.o_proj(mean) * kept[..., None], None, past_key_values


@pytest.fixture
def fla(monkeypatch):
    package, layers = ModuleType('fla'), ModuleType('fla.layers')
    layers.CausalMean, layers.number = CausalMean, 3
    package.layers = layers
    monkeypatch.setitem(sys.modules, 'fla', package)
    monkeypatch.setitem(sys.modules, 'fla.layers', layers)


def build(**kwargs):
    torch.manual_seed(0)
    config = dict(
        type='aft_mm.FlaMixer',
        layer='CausalMean',
        embed_dims=D,
        options=dict(head_dim=5, num_heads=2),
    )
    return MODELS.build({**config, **kwargs})


@pytest.mark.parametrize('grid', [(1,), (7,), (3, 5)])
def test_shapes_gradients_and_causality(fla, grid):
    mixer = build(grid=grid)
    assert mixer.layer.v_proj.weight.shape == (10, D) and mixer.position_bias() is None
    x = torch.randn(2, torch.Size(grid).numel(), D, requires_grad=True)
    y = mixer(x)
    assert y.shape == x.shape
    middle = x.shape[1] // 2
    y[:, middle].sum().backward()
    assert not x.grad[:, middle + 1 :].any()
    assert x.grad[:, : middle + 1].abs().amin((1, 2)).min() > 0
    # No parameter is there for nothing.
    assert all(parameter.grad is not None for parameter in mixer.parameters())
    assert {name.partition('.')[0] for name in mixer.state_dict()} == {'layer'}


def test_hidden_tokens_reach_nothing(fla):
    mixer = build()
    x = torch.randn(2, 6, D)
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    padded = x.masked_fill(~mask[..., None], torch.nan).requires_grad_()
    y = mixer(padded, key_mask=mask)
    torch.testing.assert_close(y[1:, :4], mixer(x[1:, :4]))
    y[mask].sum().backward()
    assert not padded.grad[~mask].any() and padded.grad.isfinite().all()


def test_it_is_a_mixer_of_a_block(fla):
    block = Block(
        D, token_mixer=dict(type='aft_mm.FlaMixer', layer='CausalMean', causal=True, proj_drop=0.5)
    )
    x = torch.randn(2, 5, D)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (
            dict(layer='GatedDeltaNets'),
            "layer must be the name of a class of fla.layers, got 'GatedDe",
        ),
        (dict(layer='number'), 'layer must be the name of a class'),
        (dict(layer=3), 'layer must be the name of a class'),
        (dict(causal=False), 'causal must be True for FlaMixer'),
        (dict(num_prefix_tokens=1), 'num_prefix_tokens must be 0 for FlaMixer'),
        (dict(qkv_bias=False), "FlaMixer has no argument 'qkv_bias'"),
        (dict(heads=3), "FlaMixer has no argument 'heads'"),
    ],
)
def test_what_it_does_not_take(fla, change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        build(**change)


def test_what_it_cannot_do_and_needs(fla, monkeypatch):
    mixer = build()
    with pytest.raises(ValueError, match='FlaMixer must have _init_state and _mix_step to'):
        mixer.init_state(2)
    with pytest.raises(ValueError, match='memory must be None for FlaMixer'):
        mixer(torch.randn(2, 3, D), memory=torch.randn(2, 4, D))
    monkeypatch.setitem(sys.modules, 'fla', None)
    with pytest.raises(ValueError, match='needs a GPU and pip install flash-linear-attention'):
        FlaMixer(D, 'GatedDeltaNet')
