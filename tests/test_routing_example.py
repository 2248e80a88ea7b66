"""examples/routing: a few steps of training, and gaps to tours found by trying all of them."""

import itertools
import json
import statistics
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / 'examples/routing'
sys.path.insert(0, str(FOLDER))

import evaluate  # noqa: E402
import train  # noqa: E402
from model import MIXERS, TourModel, tour_lengths  # noqa: E402
from oracle import test_instances as make_instances  # noqa: E402

N = 6


@pytest.mark.parametrize('mixer', MIXERS)
def test_all_steps_at_once_equal_one_after_the_other(mixer):
    model, points = TourModel(mixer, 16, 2).double(), torch.rand(2, N, 2).double()
    encoded = model.encode(points)
    tours = model.roll_out(encoded, torch.tensor([[0, 3], [5, 1]]), sample=True)
    assert (tours.sort(-1).values == torch.arange(N)).all()
    assert (tours[..., 0] == torch.tensor([[0, 3], [5, 1]])).all()
    expected, open_ = 0.0, torch.ones(2, 2, N, dtype=torch.bool)
    for step in range(N - 1):
        open_.scatter_(2, tours[..., step : step + 1], False)
        scores = model.logits(encoded, tours[..., 0], tours[..., step], open_)
        chosen = tours[..., step + 1 : step + 2]
        expected = expected + scores.log_softmax(-1).gather(-1, chosen).squeeze(-1)
    torch.testing.assert_close(model.log_probabilities(encoded, tours), expected)


@pytest.mark.parametrize('mixer', MIXERS)
def test_training_and_evaluation(mixer, tmp_path, capsys):
    train.main(
        f'--mixer {mixer} --points {N} --starts 3 --batch-size 8 --iterations 4 --log-every 2 '
        f'--embed-dims 16 --layers 1 --out {tmp_path}'.split()
    )
    settings, *rows = map(json.loads, (tmp_path / 'log.jsonl').read_text().splitlines())
    assert settings['mixer'] == mixer and [row['iteration'] for row in rows] == [2, 4]
    points = make_instances(N, 20, 7)
    every = torch.tensor([(0, *rest) for rest in itertools.permutations(range(1, N))])
    best = tour_lengths(points, every.expand(20, -1, -1)).amin(1)
    optimal = dict(points=N, seed=7, lengths=best.tolist(), mean=best.mean().item())
    (tmp_path / 'optimal.json').write_text(json.dumps(optimal))
    checkpoint = str(tmp_path / 'model.pth')
    arguments = [checkpoint, '--optimal', str(tmp_path / 'optimal.json')]
    evaluate.main([*arguments, '--json', str(tmp_path / 'gaps.json')])
    (row,) = json.loads((tmp_path / 'gaps.json').read_text())['rows']
    assert 0 <= row['gap_all_starts_percent'] <= row['gap_one_start_percent'] < 60
    assert row['gap_one_start_percent'] > 0
    model = TourModel(mixer, 16, 1)
    model.load_state_dict(torch.load(checkpoint, weights_only=True)['state_dict'])
    found = evaluate.greedy_lengths(model.eval(), points, N)
    assert (found >= best[:, None] - 1e-4).all()


def test_the_policy_gradient_shortens_tours():
    model = TourModel('aft', 16, 1)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    points, starts = torch.rand(64, 10, 2), torch.arange(10).expand(64, -1)
    lengths = []
    for _ in range(25):
        encoded = model.encode(points)
        tours = model.roll_out(encoded, starts, sample=True)
        lengths.append(tour_lengths(points, tours))
        advantage = lengths[-1] - lengths[-1].mean(1, keepdim=True)
        (advantage * model.log_probabilities(encoded, tours)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert lengths[-1].mean() < lengths[0].mean() - 0.1


def test_the_table_shows_the_gaps_of_the_runs():
    page = (FOLDER / 'README.md').read_text()
    models = {}
    for line in (FOLDER / 'results/runs.jsonl').read_text().splitlines():
        run = json.loads(line)
        models.setdefault(run['name'].rpartition('_seed')[0], []).append(run['rows'])
    assert len(models) == 11
    for name, seeds in models.items():
        # The stored gaps have three digits, so that halves are exact and rounded up.
        one, best = (
            [statistics.mean(row[key] for row in rows) + 1e-9 for rows in zip(*seeds, strict=True)]
            for key in ('gap_one_start_percent', 'gap_all_starts_percent')
        )
        gaps = ' | '.join(f'{x:.1f} / {y:.2f}' for x, y in zip(one, best, strict=True))
        assert f'| {len(seeds)} | {gaps} |' in page, name
