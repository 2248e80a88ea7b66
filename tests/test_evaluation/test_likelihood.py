"""The metric Likelihood."""

import json
import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from mmengine.evaluator import Evaluator
from mmengine.registry import METRICS
from mmengine.runner import Runner

from aft_mm.evaluation import Likelihood
from aft_mm.structures import SequenceSample


def rank_of_two(rank, samples, folder):
    """Evaluate half of the samples, collected on the CPU and on the device."""
    dist.init_process_group('gloo', init_method=f'file://{folder}/meet', rank=rank, world_size=2)
    samples = [SequenceSample(nats=nats, num_dims=dims) for nats, dims in samples]
    sampler = dict(type='DefaultSampler', shuffle=False)
    loader = Runner.build_dataloader(dict(batch_size=4, dataset=samples, sampler=sampler))
    metrics = []
    for device in ('cpu', 'gpu'):
        evaluator = Evaluator(Likelihood(collect_device=device))
        for batch in loader:
            evaluator.process(batch)
        metrics.append(evaluator.evaluate(len(samples)))
    (folder / f'{rank}.json').write_text(json.dumps(metrics))
    dist.barrier()


def samples_of(count):
    generator = torch.Generator().manual_seed(0)
    return [
        (nats.item() * 100, dims.item())
        for nats, dims in zip(
            torch.rand(count, generator=generator, dtype=torch.float64),
            torch.randint(1, 50, (count,), generator=generator),
            strict=True,
        )
    ]


def evaluate(metric, samples, batch_size=4):
    evaluator = Evaluator(metric)
    for i in range(0, len(samples), batch_size):
        evaluator.process(
            [SequenceSample(nats=nats, num_dims=dims) for nats, dims in samples[i : i + batch_size]]
        )
    return evaluator.evaluate(len(samples))


@pytest.mark.parametrize(('per', 'vocabulary'), [('dim', 256), ('char', 205), ('token', 7)])
def test_a_uniform_model_has_the_log_of_the_vocabulary(per, vocabulary):
    metric = METRICS.build(dict(type='aft_mm.Likelihood', per=per))
    metrics = evaluate(metric, [(dims * math.log(vocabulary), dims) for dims in (3072, 17, 1)])
    assert metrics.pop(f'bits_per_{per}') == pytest.approx(math.log2(vocabulary), abs=1e-12)
    assert metrics.pop(f'perplexity_per_{per}') == pytest.approx(vocabulary)
    assert not metrics


def test_the_mean_is_over_predictions_whatever_the_batches():
    samples = samples_of(17)
    nats, dims = map(math.fsum, zip(*samples, strict=True))
    results = [evaluate(Likelihood(), samples, size) for size in (1, 4, 17)]
    assert results[0] == results[1] == results[2]
    assert results[0]['bits_per_dim'] == pytest.approx(nats / dims / math.log(2), rel=1e-14)


def test_given_context_does_not_count():
    one = evaluate(Likelihood(), [(5.0, 3)])
    assert evaluate(Likelihood(), [(5.0, 3), (0.0, 0)]) == one
    with pytest.raises(ValueError, match='every token of the 2 samples is given context'):
        evaluate(Likelihood(), [(0.0, 0), (0.0, 0)])


def test_perplexity_overflows_to_infinity():
    assert evaluate(Likelihood(), [(1e6, 1)])['perplexity_per_dim'] == math.inf


def test_unknown_unit_is_named():
    with pytest.raises(ValueError, match='per must be one of dim, char, token, subword, got'):
        Likelihood(per='word')


@pytest.mark.skipif(torch.cuda.is_available(), reason='a fork cannot use CUDA')
def test_two_processes_count_every_sample_once(tmp_path):
    samples = samples_of(17)  # the second rank repeats the first sample, its last batch is short
    mp.start_processes(rank_of_two, (samples, tmp_path), 2, start_method='fork')
    expected = evaluate(Likelihood(), samples)
    for rank in range(2):
        assert json.loads((tmp_path / f'{rank}.json').read_text()) == [expected, expected]
