"""The small leaves of images and text: they compare mixers, and train."""

import math

import pytest
import torch
from mmengine.registry import MODELS

from .test_configs_autoregressive import MINI, count, family, load, sequence_length

# As many parameters as with softmax attention, within a channel of the MLPs.
COMPARED = [
    'transformer',
    'image-transformer-local1d',
    'sparse-transformer',
    'reformer',
    'linear',
    'performer',
    'synthesizer',
    'aft-simple',
    'aft-full',
    'aft-local-32',
    'aft-local-learned-32',
    'aft-local-hard-32',
    'aft-conv',
]
WIDTHS = {
    'reformer': 576,
    'synthesizer': 445,
    'aft-full': 384,
    'aft-local-32': 384,
    'aft-local-learned-32': 384,
    'aft-conv': 574,
}


def compared(mixer):
    """The leaf of a mixer in the comparison."""
    name = {'aft-conv': 'aft-conv-mini-h4-k31'}.get(mixer, f'{mixer}-mini') + '_1xb16-6e'
    return f'{name}{"-narrow" * (mixer == "aft-local-32")}_enwik8-t256'


@pytest.mark.parametrize('mixer', COMPARED)
def test_compared_mixers_have_equal_parameters(mixer):
    assert compared(mixer) in MINI
    layers, dims = 4, 128
    assert abs(count(compared(mixer)) - count(compared('transformer'))) <= layers * (2 * dims + 1)
    decoder = load(compared(mixer)).model.decoder
    assert decoder.get('mlp_ratio', 4) * dims == WIDTHS.get(mixer, 512)


def test_small_models_of_text_differ_in_the_mixer_and_the_mlp_only():
    without = []
    for name in MINI:
        if 'enwik8' in name:
            config = load(name).to_dict()
            del config['model']['decoder']['token_mixer']
            config['model']['decoder'].pop('mlp_ratio', None)
            without.append(config)
    assert len(without) == 21 and all(config == without[0] for config in without)


def test_small_models_of_mnist_differ_in_the_mixer_and_its_grid_only():
    mixers, without = {}, []
    for name in MINI:
        if 'mnist' in name:
            config = load(name).to_dict()
            mixers[family(name)] = config['model']['decoder'].pop('token_mixer')
            del config['model']['decoder']['grid']
            without.append(config)
    assert len(without) == 3 and all(config == without[0] for config in without)
    learned = dict(mixers['aft-local'], type='aft_mm.AFTLocalLearned')
    assert mixers['aft-local-learned'] == learned


@pytest.mark.parametrize('name', MINI)
def test_small_models_train(name):
    torch.manual_seed(0)
    config = load(name)
    model = MODELS.build(config.model)
    channels = (3,) if 'pixels' in name else ()
    length = min(97, sequence_length(name))
    inputs = list(torch.randint(0, 256, (2, length, *channels), dtype=torch.uint8))
    data = model.data_preprocessor(dict(inputs=inputs), training=True)

    loss = model(**data, mode='loss')['loss']
    loss.backward()
    assert loss.item() == pytest.approx(math.log(256), abs=1.5)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
