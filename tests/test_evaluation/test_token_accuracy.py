"""The metric TokenAccuracy."""

import pytest
import torch

from aft_mm.evaluation import TokenAccuracy
from aft_mm.models.heads import CategoricalHead
from aft_mm.registry import MODELS

from ..generation_models import stack


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
