"""The metric Likelihood."""

import json
import math
import sys

import pytest
import torch
from mmengine.evaluator import Evaluator
from mmengine.registry import METRICS

from aft_mm.evaluation import Likelihood
from aft_mm.structures import SequenceSample

SCRIPT = """
import json
import torch
from mmengine.config import Config
from mmengine.runner import Runner
from mmengine.evaluator import Evaluator
from aft_mm.engine.distributed import start_distributed
from aft_mm.evaluation import Likelihood
from aft_mm.structures import SequenceSample

start_distributed(Config(dict(launcher='pytorch')))
samples = [SequenceSample(nats=nats, num_dims=dims) for nats, dims in json.load(open('in.json'))]
loader = Runner.build_dataloader(dict(
    batch_size=4, num_workers=0, dataset=samples,
    sampler=dict(type='DefaultSampler', shuffle=False)))
for device in ('cpu', 'gpu'):
    evaluator = Evaluator(Likelihood(collect_device=device))
    for batch in loader:
        evaluator.process(batch)
    metrics = evaluator.evaluate(len(samples))
    json.dump(metrics, open(f'{device}_{torch.distributed.get_rank()}.json', 'w'))
"""


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


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason='mmengine starts NCCL itself')
def test_two_processes_count_every_sample_once(run, tmp_path):
    samples = samples_of(17)  # the second rank repeats the first sample, its last batch is short
    (tmp_path / 'script.py').write_text(SCRIPT)
    (tmp_path / 'in.json').write_text(json.dumps(samples))
    result = run(
        sys.executable,
        '-m',
        'torch.distributed.run',
        '--standalone',
        '--nproc_per_node=2',
        tmp_path / 'script.py',
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    expected = evaluate(Likelihood(), samples)
    for out in ('cpu_0', 'cpu_1', 'gpu_0', 'gpu_1'):
        assert json.loads((tmp_path / f'{out}.json').read_text()) == expected
