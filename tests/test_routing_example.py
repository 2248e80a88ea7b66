"""examples/routing: tours, one-way distances and vehicles, step by step and against all tours."""

import importlib.util
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
from model import MIXERS  # noqa: E402
from oracle import test_instances as make_instances  # noqa: E402
from problems import MODELS, OneWayModel, Vehicles  # noqa: E402

from aft_mm import ops  # noqa: E402

from .errors import stops  # noqa: E402

NEEDS_RL4CO = pytest.mark.skipif(
    not importlib.util.find_spec('rl4co'), reason='needs pip install rl4co'
)
N = 6
STARTS = torch.tensor([[0, 3], [5, 1]])
CASES = [*(('tsp', mixer) for mixer in MIXERS), ('atsp', 'aft'), ('cvrp', 'aft')]


def make(problem, mixer='aft'):
    torch.manual_seed(0)
    return MODELS[problem](mixer, 16, 2).double()


@pytest.mark.parametrize(('problem', 'mixer'), CASES)
def test_all_steps_at_once_equal_one_after_the_other(problem, mixer):
    model = make(problem, mixer)
    instances = model.sample(2, N).double()
    encoded = model.encode(instances)
    tours = model.roll_out(encoded, STARTS, sample=True)
    if problem != 'cvrp':
        assert (tours.sort(-1).values == torch.arange(N)).all() and (tours[..., 0] == STARTS).all()
    found = model.log_probabilities(encoded, tours)
    expected = torch.zeros_like(found)
    for sample, way in itertools.product(range(2), range(2)):
        one = type(encoded)(*(None if x is None else x[sample : sample + 1] for x in encoded))
        vehicle = Vehicles(one.demand, 1) if problem == 'cvrp' else None
        open_ = torch.ones(1, 1, one.key.shape[1], dtype=torch.bool)
        tour = tours[sample, way]
        for step in range(1, len(tour)):
            last = tour[step - 1].view(1, 1)
            if vehicle is None:
                open_[..., last] = False
                scores = model.logits(one, tour[:1].view(1, 1), last, open_)
            else:
                scores = model.next_logits(one, vehicle.at, vehicle.open(), vehicle.load)
                vehicle.visit(tour[step].view(1, 1))
            if step > 1 or vehicle is None:  # the first customer is given
                expected[sample, way] += scores.log_softmax(-1)[0, 0, tour[step]]
    torch.testing.assert_close(found, expected)


def test_one_way_distances_have_no_shortcut_and_a_direction():
    distances = OneWayModel.sample(8, 10)
    detours = (distances.unsqueeze(3) + distances.unsqueeze(1)).amin(2)
    assert (distances <= detours + 1e-6).all() and (distances != distances.mT).any()
    tours = torch.rand(8, 3, 10).argsort(-1)
    costs = OneWayModel.costs(distances, tours)
    for sample, way in itertools.product(range(8), range(3)):
        stops = tours[sample, way].tolist()
        legs = zip(stops, [*stops[1:], stops[0]], strict=True)
        expected = sum(distances[sample, a, b].item() for a, b in legs)
        assert costs[sample, way].item() == pytest.approx(expected, rel=1e-5)
    assert (OneWayModel.costs(distances, tours.flip(-1)) != costs).any()
    model = make('atsp')
    both = [model.encode(x.double()).key for x in (distances, distances.mT)]
    assert (both[0] - both[1]).abs().max() > 1e-3


@pytest.mark.parametrize('sample', [True, False])
def test_routes_visit_each_customer_once_within_the_capacity(sample):
    model = make('cvrp')
    instances = model.sample(16, 20).double()
    tours = model.roll_out(model.encode(instances), torch.arange(20).expand(16, -1), sample)
    demand = instances[..., 2].tolist()
    for index, ways in enumerate(tours.tolist()):
        for start, tour in enumerate(ways):
            assert tour[:2] == [0, 1 + start]
            assert sorted(node for node in tour if node) == list(range(1, 21))
            load = 0.0
            for node in tour:
                load = load + demand[index][node] if node else 0.0
                assert load <= 1 + 1e-4
    assert (model.costs(instances, tours) > 0).all()


@pytest.mark.parametrize('scale', [1, 1e4])
def test_no_row_is_wrong_for_biases_of_minus_ten_thousand(scale, monkeypatch):
    """Distances in other units: each node reads the nearest open ones, or the formula is wrong."""
    query, key, value = torch.randn(3, 4, N, 16)
    distances = scale * (1 + OneWayModel.sample(4, N))
    open_ = torch.rand(4, N, N) < 0.6
    open_[..., 0] = True
    found = ops.aft_full(query, key, value, -distances, pair_mask=open_)
    exponents = (key.double()[:, None] - distances.double().unsqueeze(-1)).masked_fill(
        ~open_.unsqueeze(-1), -torch.inf
    )
    weights = exponents.softmax(2)
    expected = query.double().sigmoid() * (weights * value.double()[:, None]).sum(2)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    model = MODELS['tsp']('aft', 16, 2)
    encoded = model.encode(scale * model.sample(4, N))
    tours = model.roll_out(encoded, torch.arange(N).expand(4, -1), sample=True)
    assert (tours.sort(-1).values == torch.arange(N)).all()
    loss = model.log_probabilities(encoded, tours).mean()
    loss.backward()
    grads = [x.grad for x in model.parameters() if x.grad is not None]
    assert loss.isfinite() and all(x.isfinite().all() for x in grads)


@pytest.mark.parametrize(('problem', 'mixer'), CASES)
def test_training_and_evaluation(problem, mixer, tmp_path):
    train.main(
        f'--problem {problem} --mixer {mixer} --points {N} --starts 3 --batch-size 8 '
        f'--iterations 4 --log-every 2 --embed-dims 16 --layers 1 --out {tmp_path}'.split()
    )
    settings, *rows = map(json.loads, (tmp_path / 'log.jsonl').read_text().splitlines())
    assert settings['mixer'] == mixer and [row['iteration'] for row in rows] == [2, 4]
    model, instances = MODELS[problem], make_instances(N, 20, 7, problem)
    if problem == 'cvrp':  # there and back for each customer
        every = torch.stack([torch.arange(1, N + 1), torch.zeros(N, dtype=torch.long)], 1)
        best = model.costs(instances, every.flatten().expand(20, 1, -1)).squeeze(1)
    else:
        every = torch.tensor([(0, *rest) for rest in itertools.permutations(range(1, N))])
        best = model.costs(instances, every.expand(20, -1, -1)).amin(1)
    optimal = dict(problem=problem, points=N, seed=7, lengths=best.tolist(), mean=0)
    (tmp_path / 'optimal.json').write_text(json.dumps(optimal))
    arguments = [str(tmp_path / 'model.pth'), '--optimal', str(tmp_path / 'optimal.json')]
    evaluate.main([*arguments, '--json', str(tmp_path / 'gaps.json')])
    (row,) = json.loads((tmp_path / 'gaps.json').read_text())['rows']
    if problem == 'cvrp':
        assert row['gap_all_starts_percent'] < 0
    else:
        assert 0 <= row['gap_all_starts_percent'] <= row['gap_one_start_percent'] < 100
        assert row['gap_one_start_percent'] > 0
    (tmp_path / 'optimal.json').write_text(json.dumps(optimal | dict(problem='other')))
    stops(f'must have costs of {problem}, got other', evaluate.main, arguments)


@pytest.mark.parametrize('problem', MODELS)
def test_the_policy_gradient_lowers_the_costs(problem):
    model = MODELS[problem]('aft', 16, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    instances, costs = model.sample(32, 8), []
    starts = torch.arange(8).expand(32, -1)
    for _ in range(40):
        encoded = model.encode(instances)
        tours = model.roll_out(encoded, starts, sample=True)
        costs.append(model.costs(instances, tours))
        advantage = costs[-1] - costs[-1].mean(1, keepdim=True)
        (advantage * model.log_probabilities(encoded, tours)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert costs[-1].mean() < 0.97 * costs[0].mean()


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


@NEEDS_RL4CO
@pytest.mark.parametrize('problem', MODELS)
def test_rewards_and_probabilities_of_rl4co_are_those_of_the_model(problem):
    from rl4co.envs import get_env
    from rl4co_policy import make_policy

    env = get_env(problem, generator_params=dict(num_loc=N))
    policy = make_policy(problem, 16, 2)
    state = env.reset(batch_size=[8])
    out = policy(state.clone(), env, phase='train', decode_type='multistart_sampling', num_starts=4)
    reward, log_likelihood = (x.view(4, 8) for x in (out['reward'], out['log_likelihood']))
    again = policy(state.clone(), env, phase='val', decode_type='greedy')
    assert again['reward'].shape == (8,)
    model = policy.encoder.model
    # The library's own rewards of the tours are their costs here.
    encoded, _ = policy.encoder(state)
    tours = out['actions'].view(4, 8, -1).transpose(0, 1)
    if problem == 'atsp':
        costs = model.costs(state['cost_matrix'], tours)
    else:
        depot = torch.zeros_like(tours[..., :1])
        tours = torch.cat([depot, tours], -1) if problem == 'cvrp' else tours
        costs = MODELS['tsp'].costs(state['locs'], tours)
    torch.testing.assert_close(costs.T, -reward, rtol=1e-4, atol=1e-4)
    expected = model.log_probabilities(encoded, tours)
    torch.testing.assert_close(log_likelihood.T, expected, rtol=1e-3, atol=1e-3)
    advantage = reward - reward.mean(0, keepdim=True)
    (-advantage * log_likelihood).mean().backward()
    assert any(x.grad.abs().max() > 0 for x in policy.parameters() if x.grad is not None)


@NEEDS_RL4CO
def test_the_trainer_of_rl4co_accepts_the_policy(here):
    from rl4co.envs import get_env
    from rl4co.models import POMO
    from rl4co.utils import RL4COTrainer
    from rl4co_policy import make_policy

    sizes = dict(batch_size=16, train_data_size=32, val_data_size=16, test_data_size=16)
    env = get_env('cvrp', generator_params=dict(num_loc=10))
    model = POMO(env, policy=make_policy('cvrp', 16, 1), num_starts=4, num_augment=1, **sizes)
    before = [x.clone() for x in model.policy.parameters()]
    options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer = RL4COTrainer(max_epochs=1, accelerator='cpu', devices=1, **options)
    trainer.fit(model)
    assert -10 < trainer.callback_metrics['val/reward'].item() < 0
    changed = [(a != b).any() for a, b in zip(before, model.policy.parameters(), strict=True)]
    assert sum(changed) > len(changed) / 2
