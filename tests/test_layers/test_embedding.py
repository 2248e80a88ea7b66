"""Embeddings, except for patches and positions, which test_block.py has."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from aft_mm.layers import ConvPatchEmbedding, PixelEmbedding, TokenEmbedding

from ..errors import refuses


def test_all_kinds_share_one_table():
    embedding = TokenEmbedding(5, 11, num_kinds=3)
    tokens = torch.randint(11, (2, 7))
    kinds = torch.arange(7) % 3
    torch.testing.assert_close(embedding(tokens), embedding.weight[tokens] + embedding.kind[kinds])
    assert {name for name, _ in embedding.named_parameters()} == {'weight', 'kind'}
    assert [name for name, _ in TokenEmbedding(5, 11).named_parameters()] == ['weight']


def test_position_is_the_index_of_the_first_token():
    embedding = TokenEmbedding(5, 11, num_kinds=3)
    tokens = torch.randint(11, (2, 7))
    parallel = embedding(tokens)
    position = torch.tensor([4, 2])
    rows = torch.stack([tokens[0, 4:6], tokens[1, 2:4]])
    expected = torch.stack([parallel[0, 4:6], parallel[1, 2:4]])
    assert torch.equal(embedding(rows, position), expected)


def test_tables_are_initialised_small():
    embedding = TokenEmbedding(64, 256, num_kinds=3)
    for parameter in embedding.parameters():
        assert abs(parameter.std().item() - 0.02) < 0.003 and parameter.abs().max() < 2


def test_pixels_are_scaled_to_minus_one_to_one():
    embedding = PixelEmbedding(5, 3)
    tokens = torch.tensor([0, 255, 0, 128]).view(1, 4, 1).expand(1, 4, 3)
    weight, bias = embedding.projection.weight, embedding.projection.bias
    scaled = torch.tensor([-1.0, 1.0, -1.0, 1 / 255])
    torch.testing.assert_close(embedding(tokens)[0], scaled[:, None] * weight.sum(1) + bias)


def test_a_single_channel_axis_is_optional():
    embedding, tokens = PixelEmbedding(5, 1), torch.randint(256, (2, 7))
    assert torch.equal(embedding(tokens), embedding(tokens[..., None]))


@pytest.mark.parametrize('value', [-1, 11, 256, 300])
def test_a_value_out_of_range_is_refused(value):
    tokens = torch.randint(11, (2, 7))
    tokens[1, 6] = value
    refuses(f'a token must be 0 to 10, got {value}$', TokenEmbedding(5, 11), tokens)
    if not 0 <= value < 256:
        pixels = torch.full((1, 2, 3), value)
        refuses(f'a pixel value must be 0 to 255, got {value}$', PixelEmbedding(5, 3), pixels)


@pytest.mark.parametrize('dtype', [torch.uint8, torch.int16, torch.uint16, torch.uint32])
def test_tokens_of_any_integer_type(dtype):
    embed, tokens = TokenEmbedding(5, 300), torch.tensor([[0, 7, 255]])
    assert torch.equal(embed(tokens.to(dtype)), embed(tokens))


def test_bad_arguments_raise_a_one_line_error():
    refuses('vocab_size must be an int, 1 or larger, got 0', TokenEmbedding, 5, 0)
    refuses('num_kinds must be an int, 1 or larger, got 0', TokenEmbedding, 5, 3, 0)
    refuses('num_channels must be an int, 1 or larger, got 0', PixelEmbedding, 5, 0)
    embed, message = (
        TokenEmbedding(5, 3),
        r'tokens must be a tensor \[B, T\], got torch.int64 \[1, 2',
    )
    refuses(message, embed, torch.zeros(1, 2, 3).long())
    refuses('a token must be an integer, got', embed, torch.zeros(1, 2))
    embed, message = PixelEmbedding(5, 3), r'pixels must be a tensor \[B, T, 3\], got torch.int64 '
    refuses('a pixel value must be an integer', embed, torch.zeros(1, 2, 3))
    refuses(message + r'\[1, 2, 1\]', embed, torch.zeros(1, 2, 1).long())
    refuses(message + r'\[1, 2\]', embed, torch.zeros(1, 2).long())
    message = 'patch_size of a convolutional stem must be a power of two from 2 on, got '
    for size in (1, 6):
        refuses(f'{message}{size}', ConvPatchEmbedding, 3, 8, size)
    refuses('embed_dims must be a multiple of 4, got 6', ConvPatchEmbedding, 3, 6, 8)


def test_convolutional_patches():
    """The pooled maximum before the monotonic batch norm and ReLU equals that after them."""
    embedding = ConvPatchEmbedding(3, 8, 4).eval()
    for norm in (m for m in embedding.modules() if isinstance(m, nn.BatchNorm2d)):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias)
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    image = torch.randn(2, 3, 13, 22)
    tokens, grid = embedding(image)

    x = F.pad(image, (0, 2, 0, 3))
    for conv, norm in zip(embedding.projection[0::4], embedding.projection[2::4], strict=True):
        x = F.max_pool2d(norm(F.conv2d(x, conv.weight, padding=1)).relu(), 2)
    assert grid == (4, 6) and x.shape[1] == 8
    torch.testing.assert_close(tokens, x.flatten(2).mT)
    assert [conv.out_channels for conv in embedding.projection[0::4]] == [4, 8]
