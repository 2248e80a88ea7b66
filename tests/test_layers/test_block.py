"""The block and the embeddings."""

import pytest
import torch
from mmengine.registry import MODELS
from torch import nn
from torchvision.ops import StochasticDepth

from aft_mm.layers import AFTMixer, Block, PatchEmbedding
from aft_mm.layers.block import DropPath
from aft_mm.layers.embedding import is_convolved_slowly

from ..errors import refuses
from .mixer_cases import check_steps

MIXER = dict(type='aft_mm.AFTLocal', window=2, rank=3)


def test_block_is_pre_norm_with_two_residuals():
    block = Block(8, MIXER, grid=(3, 5), mlp_ratio=2)
    x = torch.randn(2, 15, 8)
    mixed = x + block.token_mixer(block.norm1(x))
    torch.testing.assert_close(block(x), mixed + block.mlp(block.norm2(mixed)))
    assert block.mlp[0].out_features == 16
    assert block.norm1.eps == block.norm2.eps == 1e-6


def test_linear_layers_are_initialised_as_in_deit():
    block = Block(64, dict(type='aft_mm.AFTConv', num_heads=4, kernel_size=3), grid=(3, 5))
    linear = [module for module in block.modules() if isinstance(module, nn.Linear)]
    assert len(linear) == 6
    for layer in linear:
        assert (layer.bias == 0).all() and abs(layer.weight.std().item() - 0.02) < 0.005


def test_a_name_of_two_mixers_needs_its_package():
    class TokenShift(AFTMixer):
        def _mix(self, query, key, value, grid, key_mask):
            return value

    try:
        MODELS.register_module(module=TokenShift)
        message = 'type of a mixer must be aft_mm.TokenShift, or mmengine.TokenShift for that of'
        with pytest.raises(ValueError, match=message):
            Block(12, dict(type='TokenShift'))
        assert type(Block(12, dict(type='mmengine.TokenShift')).token_mixer) is TokenShift
        assert type(Block(12, dict(type='aft_mm.TokenShift')).token_mixer) is not TokenShift
    finally:
        MODELS.module_dict.pop('TokenShift', None)


def test_block_steps_equal_its_forward():
    block = Block(8, dict(causal=True, **MIXER), grid=(9,), drop_path_rate=0.5).eval()
    check_steps(block, torch.randn(2, 9, 8), lengths=(1, 1))


def test_drop_path_skips_whole_samples():
    block = Block(8, MIXER, grid=(3, 5), drop_path_rate=0.9)
    x = torch.randn(200, 15, 8)
    skipped = (block(x) == x).flatten(1).all(1).float().mean()
    assert 0.7 < skipped < 0.9
    assert torch.equal(block.eval()(x), block(x))


@pytest.mark.parametrize('p', [0.0, 0.4, 1.0])
def test_drop_path_is_that_of_torchvision(p):
    x, found = torch.randn(50, 3, 8), []
    for drop in (DropPath(p), StochasticDepth(p, mode='row')):
        torch.manual_seed(0)
        found.append(drop(x))
        assert drop.eval()(x) is x
    assert torch.equal(*found)


@pytest.mark.parametrize('autocast', [False, True])
def test_patches_of_bfloat16_are_one_product(autocast, monkeypatch):
    embedding, image = PatchEmbedding(3, 10, patch_size=4), torch.randn(2, 3, 9, 13)
    expected, grid = embedding(image)
    (own,) = torch.autograd.grad(expected.square().sum(), embedding.projection.weight)
    monkeypatch.setattr(nn.Conv2d, 'forward', None)
    if not autocast:
        embedding, image = embedding.bfloat16(), image.bfloat16()
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        tokens, found = embedding(image)
    assert tokens.dtype == torch.bfloat16 and found == grid and tokens.is_contiguous()
    torch.testing.assert_close(tokens.float(), expected, atol=0.02, rtol=0.02)
    (grad,) = torch.autograd.grad(tokens.float().square().sum(), embedding.projection.weight)
    assert (grad.float() - own).norm() < 0.02 * own.norm()


def test_patches_in_half_precision_on_a_device_are_products():
    pytest.importorskip('triton', reason='the pretended device needs Triton')
    from ..inductor_offline import pretended_device

    with pretended_device():
        image = torch.empty(2, 3, 8, 8, device='cuda')
        assert not is_convolved_slowly(image)
        for dtype in (torch.bfloat16, torch.float16):
            assert is_convolved_slowly(image.to(dtype))
            with torch.autocast('cuda', dtype):
                assert is_convolved_slowly(image)


@pytest.mark.parametrize('size', [(8, 12), (9, 12), (5, 3)], ids=str)
def test_patches_are_padded_at_the_bottom_and_on_the_right(size):
    embedding = PatchEmbedding(3, 10, patch_size=4)
    image = torch.randn(2, 3, *size)
    grid = (-(-size[0] // 4), -(-size[1] // 4))
    padded = torch.zeros(2, 3, 4 * grid[0], 4 * grid[1])
    padded[..., : size[0], : size[1]] = image
    tokens, found = embedding(image)
    assert found == grid and tokens.is_contiguous()
    weight = embedding.projection.weight.flatten(1)
    for row in range(grid[0]):
        for column in range(grid[1]):
            patch = padded[..., 4 * row : 4 * row + 4, 4 * column : 4 * column + 4].flatten(1)
            expected = patch @ weight.T + embedding.projection.bias
            torch.testing.assert_close(
                tokens[:, row * grid[1] + column], expected, atol=1e-5, rtol=1e-4
            )


CROSS = dict(type='aft_mm.SoftmaxAttention', num_heads=2)
PLACED = dict(type='aft_mm.AFTFull', rank=None, grid=(9,), source_grid=(5,))
every_cross = pytest.mark.parametrize(
    'cross', [CROSS, dict(type='aft_mm.AFTSimple'), PLACED], ids=lambda c: c['type']
)


@every_cross
def test_the_cross_mixer_is_between_mixer_and_mlp(cross):
    block = Block(8, dict(causal=True, **MIXER), grid=(9,), cross_mixer=cross).eval()
    x, memory = torch.randn(2, 9, 8), torch.randn(2, 5, 8)
    mask = torch.arange(5) < torch.tensor([[5], [2]])
    mixed = x + block.token_mixer(block.norm1(x))
    read = block.cross_mixer(block.norm_cross(mixed), memory=memory, key_mask=mask)
    y = mixed + read
    y = y + block.mlp(block.norm2(y))
    torch.testing.assert_close(block(x, memory=memory, memory_mask=mask), y)
    prefilled, state = block.prefill(x[:, :6], torch.tensor([6, 6]), memory, mask)
    torch.testing.assert_close(prefilled, y[:, :6])
    for t in range(6, 9):
        y_t, state = block.step(x[:, t], state)
        torch.testing.assert_close(y_t, y[:, t], atol=1e-5, rtol=1e-4)


def test_prompts_of_different_lengths_read_the_memory_at_their_own_positions():
    block = Block(8, dict(causal=True, **MIXER), grid=(9,), cross_mixer=PLACED).eval()
    nn.init.normal_(block.cross_mixer.pos_bias.weight)
    x, memory = torch.randn(2, 9, 8), torch.randn(2, 5, 8)
    y = block(x, memory=memory)
    _, state = block.prefill(x[:, :6], torch.tensor([6, 2]), memory)
    for t in range(3):
        y_t, state = block.step(torch.stack([x[0, 6 + t], x[1, 2 + t]]), state)
        expected = torch.stack([y[0, 6 + t], y[1, 2 + t]])
        torch.testing.assert_close(y_t, expected, atol=1e-5, rtol=1e-4)


@every_cross
def test_a_memory_is_projected_once_for_all_steps(cross):
    block = Block(8, dict(causal=True, **MIXER), grid=(9,), cross_mixer=cross).eval()
    calls = []
    for projection in (block.cross_mixer.key, block.cross_mixer.value):
        projection.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(2, 9, 8)
    _, state = block.prefill(x[:, :2], torch.tensor([2, 1]), torch.randn(2, 5, 8))
    for t in range(2, 6):
        _, state = block.step(x[:, t], state)
    assert len(calls) == 2


def test_the_cross_mixer_has_its_own_arguments():
    block = Block(8, MIXER, grid=(9,), drop_rate=0.3, cross_mixer=dict(CROSS, proj_drop=0.1))
    assert block.token_mixer.proj_drop.p == 0.3 and block.cross_mixer.proj_drop.p == 0.1
    assert Block(8, MIXER, (9,), drop_rate=0.3, cross_mixer=CROSS).cross_mixer.proj_drop.p == 0.3


@pytest.mark.parametrize(
    'cross',
    [
        dict(type='aft_mm.AFTSimple', gate='none'),
        dict(type='aft_mm.AFTSimple', causal=True),
        dict(type='aft_mm.AFTFull', grid=(9,), rank=2),
        dict(type='aft_mm.AFTConv', num_heads=2, kernel_size=3),
    ],
    ids=str,
)
def test_a_mixer_that_cannot_read_a_memory_is_refused(cross):
    message = (
        "cross_mixer must take a memory .not with gate='none'., not be causal and have no position"
    )
    refuses(message, Block, 8, MIXER, grid=(9,), cross_mixer=cross)


def test_other_bad_arguments_are_refused():
    x, block = torch.randn(2, 15, 8), Block(8, MIXER, grid=(3, 5))
    crossed = Block(8, MIXER, grid=(3, 5), cross_mixer=CROSS)
    refuses('got memory=None with cross_mixer=SoftmaxAttention', crossed, x)
    refuses(r'memory=\[2, 15, 8\] with cross_mixer=NoneType', block, x, memory=x)
    message = 'mlp_ratio must leave .*, got 0.1 with embed_dims=8'
    refuses(message, Block, 8, MIXER, grid=(9,), mlp_ratio=0.1)
    refuses('patch_size must be an int, 1 or larger, got 0', PatchEmbedding, 3, 8, 0)
