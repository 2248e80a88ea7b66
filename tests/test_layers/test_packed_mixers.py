"""Packed batches of mixers and blocks equal the loop over the sequences."""

import pytest
import torch

from aft_mm.layers import Block

from ..errors import refuses
from ..helpers import each
from .mixer_cases import MIXERS, D, build, mixer_class

LENGTHS = [3, 0, 7, 1, 7, 6]
ENDS = torch.tensor([0, *LENGTHS]).cumsum(0)
PARTS = [slice(a, b) for a, b in zip(ENDS[:-1], ENDS[1:], strict=True) if b > a]


@each('name', MIXERS)
@pytest.mark.parametrize('causal', [False, True])
def test_equals_the_loop(name, causal):
    if causal and not mixer_class(name).can_be_causal:
        return
    if 'AFTBias' in name and 'scales' in MIXERS[name]:
        return
    mixer = build(name, (7,), causal=causal).double().eval()
    x = torch.randn(1, sum(LENGTHS), D, dtype=torch.float64)
    for masked in (False, True):
        mask = torch.ones(1, x.shape[1], dtype=torch.bool)
        if masked:
            mask[:, [1, 4, 16]] = False
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        got = mixer(leaves[0], key_mask=mask if masked else None, cu_seqlens=ENDS)
        alone = [
            mixer(leaves[1][:, part], key_mask=mask[:, part] if masked else None) for part in PARTS
        ]
        expected = torch.cat(alone, 1)
        visible = mask[0]
        torch.testing.assert_close(got[:, visible], expected[:, visible])
        cotangent = torch.randn_like(got) * mask.unsqueeze(-1)
        gradients = [
            torch.autograd.grad(
                (y * cotangent).sum(), [leaf, *mixer.parameters()], allow_unused=True
            )
            for y, leaf in zip((got, expected), leaves, strict=True)
        ]
        for a, b in zip(*gradients, strict=True):
            if b is not None:
                torch.testing.assert_close(torch.zeros_like(b) if a is None else a, b)


def test_a_batch_without_a_token():
    mixer = build('AFTConv')
    x = torch.randn(1, 0, D, requires_grad=True)
    y = mixer(x, cu_seqlens=torch.tensor([0, 0]))
    assert y.shape == x.shape
    y.sum().backward()
    assert not any(p.grad is not None and p.grad.any() for p in mixer.parameters())


def test_a_block_passes_them_on():
    block = Block(D, dict(type='aft_mm.AFTConv', num_heads=4, kernel_size=3), grid=(7,)).eval()
    x = torch.randn(1, sum(LENGTHS), D)
    expected = torch.cat([block(x[:, part]) for part in PARTS], 1)
    torch.testing.assert_close(block(x, cu_seqlens=ENDS), expected)
    assert not torch.allclose(block(x), expected)
    torch.testing.assert_close(block.recomputed(x, cu_seqlens=ENDS), expected)


def test_what_a_packed_batch_excludes():
    x = torch.randn(1, 12, D)
    ends = torch.tensor([0, 12])
    refuses('grid must be None, or 1-d', build('AFTConv', (3, 4)), x, cu_seqlens=ends)
    simple = build('AFTSimple', (12,))
    refuses('grid must be None, or 1-d', simple, x, grid=(3, 4), cu_seqlens=ends)
    refuses('memory must be None', simple, x, memory=x, cu_seqlens=ends)
    refuses('position_bias must be None', build('AFTBias'), x, position_bias=x, cu_seqlens=ends)
    prefixed = build('AFTSimple', (11,), num_prefix_tokens=1)
    refuses('num_prefix_tokens must be 0 with cu_seqlens, got 1', prefixed, x, cu_seqlens=ends)
