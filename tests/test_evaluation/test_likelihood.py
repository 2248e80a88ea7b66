"""Likelihoods, and how often the most likely token is the true one."""

import json
import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from mmengine.evaluator import Evaluator
from mmengine.registry import METRICS
from mmengine.runner import Runner

from aft_mm.evaluation import Likelihood, TokenAccuracy
from aft_mm.models.heads import CategoricalHead
from aft_mm.registry import MODELS
from aft_mm.structures import SequenceSample

from ..generation_models import stack


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


def model(head):
    embedding = dict(type='aft_mm.TokenEmbedding', vocab_size=256)
    decoder = stack('SequenceDecoder', embedding=embedding, grid=(9,))
    return MODELS.build(
        dict(type='aft_mm.AutoregressiveModel', decoder=decoder, head=dict(head, embed_dims=8))
    )


def test_correct_tokens_and_sequences():
    metric = TokenAccuracy()
    counts = [(3, 4), (2, 2), (0, 1), (1, 1)]
    metric.process(None, [dict(num_correct=hit, num_dims=n) for hit, n in counts])
    assert metric.compute_metrics(metric.results) == dict(
        percent_correct_tokens=75.0, percent_correct_sequences=50.0
    )
    only_context = [(0, 0), *counts]
    found = metric.compute_metrics(only_context)
    assert found['percent_correct_sequences'] == 50
    with pytest.raises(ValueError, match='at least one prediction'):
        metric.compute_metrics([(0, 0)])
    with pytest.raises(ValueError, match='num_correct, which a model with a CategoricalHead'):
        metric.process(None, [dict(num_dims=3)])


def test_only_predicted_tokens_count():
    """The bias of the head makes token 7 the most likely one everywhere."""
    net = model(dict(type='aft_mm.CategoricalHead', num_classes=256)).eval()
    torch.nn.init.zeros_(net.head.weight)
    net.head.bias.data[7] = 1
    inputs = [torch.tensor([7, 7, 7, 2, 7]), torch.tensor([7, 1, 7])]
    data = net.data_preprocessor(dict(inputs=inputs))
    data['data_samples'][0].set_metainfo(dict(num_context=2))
    first, second = net(**data, mode='predict')
    assert (first.num_correct, first.num_dims) == (2, 3)
    assert (second.num_correct, second.num_dims) == (2, 3)


def test_a_mixture_has_no_most_likely_value():
    net = model(dict(type='aft_mm.LogisticMixtureHead', num_channels=1, num_components=2))
    (sample,) = net(**net.data_preprocessor(dict(inputs=[torch.tensor([7, 1])])), mode='predict')
    assert 'num_correct' not in sample and not hasattr(net.head, 'most_likely')
    assert CategoricalHead(4, 5).most_likely(torch.randn(2, 3, 4)).shape == (2, 3)
