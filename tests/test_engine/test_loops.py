"""GenerationTestLoop: the samples that a metric gets, and their noise."""

from types import SimpleNamespace

import pytest
import torch
from mmengine.dataset import pseudo_collate
from torch.utils.data import DataLoader

from aft_mm.engine import GenerationTestLoop, derived_seed
from aft_mm.errors import UserError
from aft_mm.structures import SequenceSample

from ..generation_models import points_model, super_resolution_model


class Metric:
    def __init__(self):
        self.samples, self.inputs = [], []

    def process(self, data_samples, data_batch):
        self.samples += [sample.to_dict() for sample in data_samples]
        self.inputs += data_batch['inputs']

    def evaluate(self, size):
        return dict(size=size)


class Sequences(torch.utils.data.Dataset):
    """Seven sequences of 15 tokens, or of the given lengths."""

    metainfo = {}

    def __init__(self, lengths=(15,) * 7):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(32, (self.lengths[index],), generator=generator)
        return dict(inputs=tokens, data_samples=SequenceSample(metainfo=dict(number=index)))


class Pairs(Sequences):
    """Pixels [24, 3] and their sources [6, 3]; the last two have one source."""

    def __init__(self, shift=0):
        super().__init__()
        self.shift = shift

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(min(index + self.shift, 5))
        source = torch.randint(256, (6, 3), generator=generator)
        return dict(
            inputs=source.repeat(4, 1),
            data_samples=SequenceSample(metainfo=dict(number=index), source=source),
        )


def run(model, dataset=None, rank=0, world_size=1, batch_size=3, times=1, **options):
    dataset = dataset or Sequences()
    runner = SimpleNamespace(
        model=model,
        rank=rank,
        world_size=world_size,
        call_hook=lambda *args, **kwargs: None,
        visualizer=SimpleNamespace(dataset_meta=None),
    )
    loader = DataLoader(
        dataset,
        batch_size,
        sampler=range(rank, len(dataset), world_size),
        collate_fn=pseudo_collate,
    )
    metric = Metric()
    loop = GenerationTestLoop(runner, loader, metric, **options)
    for _ in range(times):
        assert loop.run() == dict(size=len(dataset))
    return metric.samples


def drawn(samples):
    return [sample['generated'] for sample in samples]


@pytest.fixture(scope='module')
def points():
    return points_model()


@pytest.fixture(scope='module')
def pairs():
    return super_resolution_model()


def test_every_sample_has_likelihood_and_samples_of_its_length(points):
    lengths = (15, 9, 1, 15, 4, 4, 7)
    samples = run(points, Sequences(lengths), num_samples=2)
    assert [sample['number'] for sample in samples] == list(range(7))
    assert [tuple(tokens.shape) for tokens in drawn(samples)] == [(2, n) for n in lengths]
    assert all(
        sample['nats'] > 0 and sample['num_dims'] == n
        for sample, n in zip(samples, lengths, strict=True)
    )


def test_samples_are_those_of_the_model(points, pairs):
    options = dict(num_samples=2, temperature=0.7, seed=5)
    for model, dataset in ((points, Sequences()), (pairs, Pairs())):
        found = drawn(run(model, dataset, **options))
        for batch, numbers in enumerate(([0, 1, 2], [3, 4, 5], [6])):
            data = [dataset[i] for i in numbers]
            length = len(data[0]['inputs'])
            given = dict(batch_size=2 * len(data))
            if model is pairs:
                given = dict(source=[d['data_samples'].source for d in data for _ in range(2)])
            seed = derived_seed(5, 0, batch)
            expected = model.generate(length, temperature=0.7, seed=seed, **given)
            assert torch.equal(torch.cat([found[i] for i in numbers]), expected)


def test_no_two_batches_or_ranks_share_noise_and_runs_repeat(points):
    """Without context, samples differ only by the noise."""
    ranks = [drawn(run(points, rank=rank, world_size=2, batch_size=1)) for rank in (0, 1)]
    every = [tuple(tokens.flatten().tolist()) for tokens in ranks[0] + ranks[1]]
    assert len(set(every)) == 7
    again = drawn(run(points, rank=1, world_size=2, batch_size=1))
    assert all(map(torch.equal, again, ranks[1]))
    batch = drawn(run(points, batch_size=7, num_samples=2))
    assert len({tuple(row.tolist()) for tokens in batch for row in tokens}) == 14


def test_samples_of_one_source_differ_and_depend_on_it(pairs):
    found = drawn(run(pairs, Pairs(), batch_size=7, num_samples=2))
    assert (found[5] != found[6]).any() and (found[0][0] != found[0][1]).any()
    others = drawn(run(pairs, Pairs(shift=1), batch_size=7, num_samples=2))  # with the same noise
    assert (found[0] != others[0]).any() and (found[6] == others[6]).all()


def test_options_change_the_samples(points):
    first = drawn(run(points))
    for options in (dict(seed=1), dict(temperature=0.1), dict(top_k=1), dict(top_p=0.05)):
        other = drawn(run(points, **options))
        assert any((a != b).any() for a, b in zip(first, other, strict=True)), options


def test_autocast_reaches_the_samples(points, monkeypatch):
    """The logits of the first token, before any sampling, have fewer bits."""
    sample, seen = points.head.sample, []

    def record(hidden, **options):
        seen.append((hidden, points.head.logits(hidden)))
        return sample(hidden, **options)

    monkeypatch.setattr(points.head, 'sample', record)
    first = []
    for fp16 in (True, False):
        seen.clear()
        nats = [sample['nats'] for sample in run(points, fp16=fp16, batch_size=7)]
        first.append((*seen[0], torch.tensor(nats)))
    (half_hidden, half, half_nats), (hidden, full, nats) = first
    assert half.dtype == torch.bfloat16 and full.dtype == torch.float32
    for coarse, fine in ((half_hidden, hidden), (half, full), (half_nats, nats)):
        assert (coarse != fine).any()
        torch.testing.assert_close(coarse.to(fine), fine, rtol=0.05, atol=0.1)


@pytest.mark.parametrize(('world_size', 'batch_size'), [(1, 7), (2, 3), (3, 2)])
@pytest.mark.parametrize('num_inputs', [0, 1, 4, 100])
def test_only_the_first_inputs_are_sampled_for(points, world_size, batch_size, num_inputs):
    options = dict(world_size=world_size, batch_size=batch_size, num_inputs=num_inputs)
    samples = [sample for rank in range(world_size) for sample in run(points, rank=rank, **options)]
    with_draws = sorted(sample['number'] for sample in samples if 'generated' in sample)
    assert with_draws == list(range(min(7, num_inputs))) and len(samples) == 7
    assert all('nats' in sample for sample in samples)


def test_a_second_test_samples_for_the_same_inputs(points):
    samples = run(points, num_inputs=2, times=2)
    assert [sample['number'] for sample in samples if 'generated' in sample] == [0, 1, 0, 1]


def test_progress_is_shown_once(points, capsys):
    run(points)
    assert capsys.readouterr().err.count('100%') == 3
    run(points, rank=1, world_size=2)
    assert not capsys.readouterr().err


def test_random_numbers_and_mode_of_the_model_are_left_alone(points):
    torch.manual_seed(0)
    next(iter(DataLoader(Sequences(), collate_fn=pseudo_collate)))  # takes one for its workers
    state = torch.get_rng_state()
    torch.manual_seed(0)
    run(points)
    assert torch.equal(torch.get_rng_state(), state) and not points.training


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(num_samples=0), 'num_samples of test_cfg must be an int, 1 or larger, got 0'),
        (dict(num_samples=1.5), 'num_samples of test_cfg .* got 1.5'),
        (dict(num_inputs=-1), 'num_inputs of test_cfg must be an int, 0 or larger, got -1'),
        (dict(seed=-1), 'seed of test_cfg must be an int, 0 or larger, got -1'),
        (dict(temperature=0), 'temperature of test_cfg must be a finite number above 0, got 0'),
    ],
)
def test_bad_options_are_named(points, options, message):
    with pytest.raises((UserError, ValueError), match=message):
        run(points, **options)


def test_derived_seeds_differ():
    seeds = [derived_seed(*numbers) for numbers in ((0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0))]
    assert len(set(seeds)) == 4 and seeds[0] == derived_seed(0, 0, 1)
    torch.Generator().manual_seed(max(seeds))
