"""tools/analysis_tools/softmax_to_aft.py: converted layers, and a study of a small network."""

import json
from pathlib import Path

import numpy as np
import pytest
import softmax_to_aft
import timm
import torch
from PIL import Image

from aft_mm.layers import SoftmaxAttention

from ..errors import stops

GRID = (3, 4)
TOKENS = 12


def mixers(start, mean, seed=0):
    """Return attention [T, T] by offset in each of two heads, the old mixer and the new one."""
    torch.manual_seed(0)
    old = SoftmaxAttention(8, num_heads=2)
    rows, columns = (torch.arange(TOKENS) // 4, torch.arange(TOKENS) % 4)
    row, column = (x[None] - x[:, None] for x in (rows, columns))
    new = softmax_to_aft.replaced(old, start, mean, seed).eval()
    return mean[:, row + 2, column + 3], old, new


@torch.no_grad()
@pytest.mark.parametrize('start', ['attention', 'convolution', 'zero'])
def test_a_converted_layer_mixes_values_with_the_mean_attention(start):
    torch.manual_seed(1)
    attention, old, new = mixers(start, torch.rand(2, 5, 7) / 5)
    x = torch.randn(3, TOKENS, 8)
    if start == 'convolution':
        attention = attention / attention.sum(2).mean(1)[:, None, None]
    elif start == 'attention':
        attention = attention / attention.sum(2, keepdim=True)
    else:
        attention = torch.full_like(attention, 1 / TOKENS)
    mixed = attention @ old.value(x).unflatten(-1, (2, 4)).transpose(1, 2)
    expected = old.proj(mixed.transpose(1, 2).flatten(2))
    torch.testing.assert_close(new(x, grid=GRID), expected)


def test_what_is_random_has_its_seed():
    mean = torch.rand(2, 5, 7)
    _, old, shuffled = mixers('shuffled', mean)
    weight = shuffled.pos_bias.weight.detach()
    assert not torch.equal(weight, mean.log())
    assert torch.equal(weight.flatten(1).sort(1)[0], mean.log().flatten(1).sort(1)[0])
    assert torch.equal(weight, mixers('shuffled', mean)[2].pos_bias.weight)
    assert not torch.equal(weight, mixers('shuffled', mean, 1)[2].pos_bias.weight)
    assert torch.equal(shuffled.value.weight, old.value.weight)
    assert not torch.equal(mixers('random', mean, 1)[2].value.weight, old.value.weight)


@pytest.fixture
def study(here, monkeypatch):
    """Return a function that runs the tool on 18 pictures of 3 classes and a network of 3 layers of 56 px."""
    torch.manual_seed(0)
    options = dict(img_size=56, patch_size=14, embed_dim=64, depth=3, num_heads=2, num_classes=0)
    torch.save(timm.models.VisionTransformer(**options).state_dict(), 'vit.pth')
    rng = np.random.default_rng(0)
    for part, label, number in np.ndindex(2, 3, 3):
        path = Path('photos', ('train', 'val')[part], 'abc'[label], f'{number}.png')
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 100 + 77 * label, (60, 70, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)

    def run(*words):
        softmax_to_aft.main(['vit.pth', 'photos', 'runs.jsonl', '--size', '56', *words])
        return [json.loads(line) for line in Path('runs.jsonl').read_text().splitlines()]

    # Two batches of each part.
    monkeypatch.setattr(softmax_to_aft, 'BATCH', 2)
    return run


@pytest.mark.parametrize('token', [[], ['--class-token']])
def test_a_study_measures_each_model_once(study, token, capsys):
    words = [*token, '--layers', '1-1', '1-2', '3-3', '--seeds', '0', '1']
    rows = study(*words)
    assert len(rows) == 1 + 3 * (3 + 2 * 2)
    printed = capsys.readouterr().out.splitlines()[-16:]
    assert printed == softmax_to_aft.table(rows) and len(printed) == 16
    for row in rows:
        assert row['top1'] == pytest.approx(
            100 * softmax_to_aft.right_answers(row).mean(), abs=0.01
        )
    # Tokens shared by several models give what one pass of the whole model gives.
    args = softmax_to_aft.parse_args(['vit.pth', 'photos', 'runs.jsonl', '--size', '56', *words])
    whole = softmax_to_aft.Study(args)
    means = whole.mean_attention()
    for start, last in (('attention', 1), ('attention', 2), ('shuffled', 3), ('attention', 2)):
        model = softmax_to_aft.converted(whole.softmax, start, (1, last), means, 0)
        key = (start,) * last + (softmax_to_aft.SOFTMAX,) * (3 - last)
        found = whole.features(model, key, (1, 2), 'test')
        with torch.no_grad():
            expected = model(whole.images(slice(None)))[0]
        np.testing.assert_allclose(found, expected, atol=1e-5)
    assert {*whole.tokens} == {('attention',), ('attention',) * 2}
    assert study(*words) == rows
    fine_tuned = study(*words[:-3], *'--epochs 2 --mixers softmax attention --seeds 3'.split())
    assert fine_tuned[: len(rows)] == rows
    assert [(row['mixer'], row['layers'], row['epochs']) for row in fine_tuned[len(rows) :]] == [
        ('softmax', '', 2),
        *(('attention', span, 2) for span in ('1-1', '1-2', '3-3')),
    ]


def test_differences_are_of_the_same_pictures_seeds_and_sizes():
    answers = np.array(
        [[1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]]
    )

    def row(mixer, seed, size, right):
        return dict(
            class_token=True,
            data='photos',
            size=size,
            epochs=1,
            lr=1e-5,
            layers='' if mixer == 'softmax' else '1-2',
            mixer=mixer,
            seed=seed,
            top1=100 * float(right.mean()),
            pictures=8,
            right=np.packbits(right).tobytes().hex(),
        )

    rows = [row('softmax', seed, 112, answers[seed]) for seed in (0, 1)]
    rows += [row('zero', 1, 112, answers[2]), row('zero', 0, 224, answers[2])]
    softmax, small, large = softmax_to_aft.table(rows)
    assert '| 75.0 (50.0–100.0) |  |' in softmax
    half = 1.96 * 100 * (answers[2] - answers[1]).std(ddof=1) / 8**0.5
    assert small.endswith(f'| −25.0 ± {half:.1f} |') and 'photos, 112 px' in small
    assert large.endswith('|  |') and 'photos, 224 px' in large
    (both,) = softmax_to_aft.table(
        rows[:2] + [row('zero', seed, 112, answers[2]) for seed in (0, 1)]
    )[1:]
    assert '| −50.0 ± ' in both


def test_speed_and_wrong_input(study):
    rows = study('--speed', '28', '--layers', '1-3', '--mixers', 'attention')
    assert [(row['mixer'], row['layers'], row['size']) for row in rows] == [
        ('softmax', '', 28),
        ('attention', '1-3', 28),
    ]
    assert rows[0]['speedup'] == 1
    for text in ('0-2', '2-1', '1-4', '3', 'a-b'):
        stops(f"--layers must be FIRST-LAST of 1 to 3, got '{text}'", study, '--layers', text)
    Path('photos/val/b').rename('photos/val/d')
    stops("'photos/val' must have the classes a, b, c, got a, c, d", study, '--layers', '1-3')
    for label in 'acd':
        Path('photos/val', label).rename(f'photos/{label}')
    stops("'photos/val' must have the classes a, b, c, got none", study, '--layers', '1-3')
    Path('photos/train/c').rename('photos/e')
    stops("'photos/train' must have 3 classes or more, got a, b", study, '--layers', '1-3')
