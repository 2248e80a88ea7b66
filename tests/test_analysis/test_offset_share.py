"""The share of the variance of attention that a function of the offset explains."""

import csv

import numpy as np
import pytest
import torch

from aft_mm.analysis.plot_attention import (
    MeanAttention,
    mean_relative_attention,
    offset_share,
    shuffle_patches,
)
from aft_mm.cli.main import main

from ..errors import stops

GRID = (4, 5)
TOKENS = 20


def share_of(attention):
    mean = attention.double().mean(0)
    return offset_share(mean_relative_attention(mean, GRID), mean.square().mean((1, 2)))


def by_offset(function):
    """Return the matrix [1, 1, T, T] of a function [7, 9] of the offset."""
    rows, columns = np.divmod(np.arange(TOKENS), GRID[1])
    row, column = (x[None] - x[:, None] for x in (rows, columns))
    return torch.from_numpy(function[row + 3, column + 4])[None, None]


def test_the_share_of_attention_with_a_known_one():
    rng = np.random.default_rng(0)
    attention = by_offset(rng.random((7, 9)))
    assert share_of(attention).item() == pytest.approx(1)
    # Attention to one place, wherever the query is, is least explained by the offset.
    columns = torch.zeros(1, 1, TOKENS, TOKENS)
    columns[..., 7] = 1
    assert share_of(columns).item() < 0.2
    # Against least squares with an indicator of each offset.
    attention = attention + torch.from_numpy(rng.random((1, 2, TOKENS, TOKENS)))
    indicators = np.stack([by_offset(x.reshape(7, 9))[0, 0].flatten() for x in np.eye(63)], 1)
    for head, share in enumerate(share_of(attention)):
        values = attention[0, head].flatten().numpy()
        fitted = indicators @ np.linalg.lstsq(indicators, values, rcond=None)[0]
        assert share.item() == pytest.approx(1 - (values - fitted).var() / values.var())
        assert 0.3 < share < 0.8


def test_the_mean_is_better_explained_than_its_images():
    base = by_offset(np.random.default_rng(0).random((7, 9)))
    noise = torch.randn(400, 1, TOKENS, TOKENS, dtype=torch.float64) / 2
    attention = torch.zeros(400, 1, TOKENS + 1, TOKENS + 1, dtype=torch.float64)
    attention[..., 1:, 1:] = base + noise
    variance = base.var(correction=0).item()
    for number, tolerance in ((400, 0.01), (40, 0.03)):
        mean = MeanAttention((16, 20), 1)
        for part in attention[:number].split(15):
            mean.next_batch(len(part))
            mean.take(part)
        of_mean, of_images = mean.offset_shares()['layer 0']
        assert of_images.item() == pytest.approx(variance / (variance + 0.25), abs=tolerance)
        # With the variance of 40 images it would be 0.93.
        assert of_mean.item() == pytest.approx(1, abs=tolerance)


def test_patches_are_moved_whole_and_in_another_order_in_each_image():
    images = torch.arange(2 * 3 * 8 * 12).float().view(2, 3, 8, 12)
    shuffled = shuffle_patches(images, 4, 0)

    def patches(x):
        return {
            tuple(p.flatten().tolist())
            for p in x.unfold(1, 4, 4).unfold(2, 4, 4).flatten(1, 2).unbind(1)
        }

    for before, after in zip(images, shuffled, strict=True):
        assert patches(before) == patches(after)
        assert not torch.equal(before, after)
    places = shuffled[:, 0, ::4, ::4] - images[:, 0, :1, :1]
    assert not torch.equal(*places)


TIMM = ['plot', 'attention', 'timm:deit_tiny_patch16_224']


def test_the_command_writes_shares_of_random_weights_and_refuses_wrong_options(here, capsys):
    shares = {}
    for name, options in dict(noise=[], shuffled=['--shuffle', '32']).items():
        words = '--noise --num 2 --layers 0,11 --heads all --out a.png --csv a.csv'.split()
        main([*TIMM, *words, *options])
        rows = list(csv.DictReader((here / 'a.csv').open()))
        assert [(row['layer'], row['head']) for row in rows] == [
            (f'layer {layer}', str(head)) for layer in (0, 11) for head in range(3)
        ]
        shares[name] = [float(row['offset_share_of_images']) for row in rows]
        assert all(0 < share < 1 for share in shares[name])
    assert shares['noise'] != shares['shuffled']
    assert '2 noise images with shuffled squares of 32 px' in capsys.readouterr().out
    (here / 'a.pth').touch()
    for options, message in (
        (
            ['--noise', '--shuffle', '30'],
            r'--shuffle must divide images of \(224, 224\) pixels, got 30',
        ),
        (['--noise', '--shuffle', '0'], '--shuffle must be an int, 1 or larger, got 0'),
        (['a.pth', 'a.jpg', '--noise'], '--noise cannot be combined with images'),
    ):
        stops(message, main, [*TIMM, *options, '--num', '1', '--out', 'b.png'])
    assert not (here / 'b.png').exists()
