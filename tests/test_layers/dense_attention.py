"""Softmax attention over explicit pairs of tokens, and checks of memory and gradients."""

import torch
import torch.nn.functional as F
from torch import nn

D, HEADS = 12, 3


def randomize(mixer):
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return mixer.double()


def heads(x):
    return x.unflatten(2, (HEADS, -1)).transpose(1, 2)


def joined(x):
    return x.transpose(1, 2).flatten(2)


def assert_is_dense_attention(mixer, visible, masked):
    """Compare output and gradients with attention over the pairs of a mask [T, T].

    With `masked`, hidden tokens are NaN, and a row that sees no token is 0.
    """
    x = torch.randn(3, len(visible), D, dtype=torch.float64, requires_grad=True)
    key_mask = torch.rand(x.shape[:2]) < (0.6 if masked else 2)
    key_mask[1] = True
    hidden, visible = ~key_mask[..., None], visible & key_mask[:, None]
    some = visible.any(-1, keepdim=True)
    zeroed = x.masked_fill(hidden, 0)
    parts = (heads(project(zeroed)) for project in (mixer.query, mixer.key, mixer.value))
    mixed = F.scaled_dot_product_attention(*parts, attn_mask=(visible | ~some)[:, None])
    expected = mixer.proj(joined(mixed) * some)
    got = mixer(x.masked_fill(hidden, torch.nan), key_mask=key_mask if masked else None)
    torch.testing.assert_close(got, expected)
    assert_same_gradients(got, expected, [x, *mixer.parameters()])


def assert_same_gradients(got, expected, inputs, rows=...):
    cotangent = torch.randn_like(got[rows])
    gradients = (torch.autograd.grad(y[rows], inputs, cotangent) for y in (got, expected))
    torch.testing.assert_close(*gradients)


def saved_bytes(mixer, tokens):
    """Return how much autograd keeps of a call with one sequence."""
    sizes = {}

    def pack(tensor):
        sizes[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        mixer(torch.randn(1, tokens, D, dtype=torch.float64))
    return sum(sizes.values())
