"""A list as `token_mixer`: one mixer per block."""

from copy import deepcopy

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS
from torch import nn

from aft_mm.analysis.explore import layers_of
from aft_mm.analysis.model_complexity import saved_memory
from aft_mm.analysis.networks import by_layer, mixers_with_keys
from aft_mm.export.image_graphs import check_any_size
from aft_mm.export.sequence_graphs import Transcriber, check_decoder
from aft_mm.models import AFTViT
from aft_mm.visualization import choose, mixers_with_bias

from ..errors import refuses, refuses_input
from .sequence_models import D, all_mixers, decoder, decoder_config, mixer, model, randomize, tokens

SIMPLE, SOFTMAX, FULL = (mixer(name) for name in ('AFTSimple', 'SoftmaxAttention', 'AFTFull'))
CONV = mixer('AFTConv')


def of_uniform_models(hybrid, layers, build, configs):
    """Give the hybrid weights of models of one mixer, and return its blocks taken from them."""
    blocks = []
    for i, config in enumerate(configs):
        uniform = randomize(build(config))
        blocks.append(uniform.layers[i])
        layers[i].load_state_dict(uniform.layers[i].state_dict())
    return blocks


@pytest.mark.parametrize('grid', [(1,), (7,), (63,), (3, 5)])
@pytest.mark.parametrize('kind', ['SequenceDecoder', 'SequenceEncoder'])
def test_a_stack_is_the_composition_of_blocks_of_uniform_ones(kind, grid):
    def build(token_mixer):
        config = decoder_config(grid, num_kinds=1, num_layers=3, token_mixer=token_mixer)
        return MODELS.build(dict(config, type=f'aft_mm.{kind}'))

    configs = [FULL, SOFTMAX, SIMPLE]
    hybrid = randomize(build(configs))
    blocks = of_uniform_models(hybrid, hybrid.layers, build, configs)
    x = tokens(2, *grid).flatten(1)
    if kind == 'SequenceDecoder':
        expected = hybrid._embed(x)[:, : x.shape[1]]
    else:
        expected = hybrid.add_positions(hybrid.embedding(x))
    for block in blocks:
        expected = block(expected)
    torch.testing.assert_close(hybrid(x), hybrid.norm(expected))


def test_a_backbone_is_the_composition_of_blocks_of_uniform_ones():
    def build(token_mixer):
        arch = dict(embed_dims=D, num_layers=3)
        return AFTViT(arch, (20, 28), 4, token_mixer=token_mixer, out_type='featmap')

    configs = [CONV, SOFTMAX, FULL]
    hybrid = randomize(build(configs))
    blocks = of_uniform_models(hybrid, hybrid.layers, build, configs)
    image = torch.randn(2, 3, 18, 28)
    x, grid = hybrid._embed(image)
    for block in blocks:
        x = block(x, grid)
    expected = hybrid.norm(x).mT.unflatten(2, grid)
    torch.testing.assert_close(hybrid(image)[0], expected)
    message = 'AFTViT with 3 layers of AFTConv and SoftmaxAttention and AFTFull and D=12: it lacks'
    refuses(message, hybrid.load_state_dict, {'layers.0.norm1.bias': torch.zeros(D)})


@pytest.mark.parametrize('grid', [(12,), (3, 4)])
def test_steps_of_all_mixers_in_one_decoder_equal_the_parallel_forward(grid):
    body = decoder(grid=grid, **all_mixers()).double()
    x, rows, lengths = tokens(3, 12), torch.tensor([2, 0, 2]), torch.tensor([5, 0, 3])
    # A prompt is padded with any token.
    prompt = x[:, :5].where(torch.arange(5) < lengths[:, None], 6)
    hidden, state = body.prefill(prompt, lengths)
    torch.testing.assert_close(hidden, body(x)[range(3), lengths])
    x, position = x[rows], lengths[rows]
    expected, state = body(x), body.select_state(state, rows)
    torch.testing.assert_close(body(x[:, :5]), expected[:, :5])
    while position.max() < 11:
        hidden, state = body.step(x[range(3), position], state)
        position = position + 1
        assert (state.position == position).all()
        torch.testing.assert_close(hidden, expected[range(3), position])
    refuses('position table of 12 tokens, got 13', body.step, x[:, 11], state)


@pytest.mark.parametrize(
    'token_mixer, message',
    [
        (
            [FULL, SIMPLE],
            'a dict for all blocks or a list with one for each of the 3, got a list of 2',
        ),
        ([], 'a list with one for each of the 3, got a list of 0'),
        ([FULL] * 4, 'got a list of 4'),
        ([FULL, None, FULL], r'token_mixer\[1\] must be a dict with a type, .* got None'),
        ([FULL, FULL, [FULL]], r'token_mixer\[2\] must be a dict with a type, .* got \['),
        ('AFTFull', "token_mixer must be a dict with a type, .* got 'AFTFull'"),
    ],
)
def test_other_lists_are_refused(token_mixer, message):
    refuses(message, decoder, num_layers=3, token_mixer=token_mixer)
    arch = dict(embed_dims=D, num_layers=3)
    refuses(message, AFTViT, arch, 8, 4, token_mixer=token_mixer)


def test_configs_inherit_lists_and_replace_them(tmp_path):
    one, several = dict(SIMPLE, key_function='relu'), [SIMPLE, SOFTMAX]
    for base, child, delete in ((one, several, {}), (several, one, dict(_delete_=True))):
        Config(dict(token_mixer=base)).dump(tmp_path / 'base.py')
        given = {**child, **delete} if delete else child
        text = f"_base_ = 'base.py'\ntoken_mixer = {given}\n"
        (tmp_path / 'child.py').write_text(text)
        assert Config.fromfile(tmp_path / 'child.py').token_mixer == child
    (tmp_path / 'child.py').write_text(f"_base_ = 'base.py'\ntoken_mixer = {one}\n")
    with pytest.raises(TypeError, match='_delete_=True'):
        Config.fromfile(tmp_path / 'child.py')


def test_one_mixer_of_a_list_is_changed_by_its_index():
    config = Config(dict(model=decoder_config(num_layers=2, token_mixer=[SIMPLE, SOFTMAX])))
    given = deepcopy(config)
    config.merge_from_dict({'model.token_mixer.0.key_function': 'relu'})
    built = MODELS.build(config.model)
    assert built.layers[0].token_mixer.key_function == 'relu'
    assert MODELS.build(given.model).layers[0].token_mixer.key_function == 'softmax'


def test_saved_memory_counts_each_kind_of_block():
    def count(*configs):
        net = model(grid=(9,), num_layers=len(configs), token_mixer=list(configs))
        return saved_memory(net, lambda: net(tokens(1, 9), mode='loss')['loss'])

    # Of the same mixer, but without an equal config, so that every block runs.
    default = dict(SIMPLE, key_function='softmax')
    counted = count(SIMPLE, SOFTMAX, SIMPLE)
    assert counted == count(SIMPLE, SOFTMAX, default) != count(SIMPLE, SIMPLE, SIMPLE)


def test_pictures_number_the_blocks():
    arch = dict(embed_dims=D, num_layers=4)
    net = AFTViT(arch, 12, 4, token_mixer=[SOFTMAX, CONV, SIMPLE, FULL])
    biased = by_layer(mixers_with_bias(net))
    assert list(biased) == [1, 3] and biased[3] is net.layers[3].token_mixer
    assert list(by_layer(mixers_with_keys(net))) == [0, 1, 2, 3]
    layers = layers_of(mixers_with_bias(net), Config())
    assert [(layer.name, layer.number) for layer in layers] == [
        ('layers.1.token_mixer', 1),
        ('layers.3.token_mixer', 3),
    ]
    for names in (('a.0', 'b.0'), ('encoder.layers.1', 'decoder.layers.3')):
        assert list(by_layer({f'{name}.token_mixer': net for name in names})) == [0, 1]
    assert [choose('layers', choice, [1, 3]) for choice in ('all', 'first:1', '3', 'even:9')] == [
        [1, 3],
        [1],
        [3],
        [1, 3],
    ]
    refuses("layers must be .* or some of 1, 3 as in '1,3', got '2'", choose, 'layers', '2', [1, 3])
    refuses("or some of 0 to 1 as in '0,1', got '2'", choose, 'layers', '2', 2)


def test_graphs_refuse_by_every_block():
    linear = mixer('LinearAttention')
    net = model(num_layers=2, token_mixer=[SIMPLE, linear])
    refuses_input('with a state, got LinearAttention', check_decoder, net, 'c.py')
    net = model(num_layers=2, token_mixer=[SIMPLE, SOFTMAX])
    message = 'SoftmaxAttention of c.py must be in all blocks or none, got AFTSimple and Softmax'
    refuses_input(message, check_decoder, net, 'c.py')
    lstm = dict(decoder_config(num_kinds=1), token_mixer=[SIMPLE, mixer('LSTM')])
    net = nn.Module()
    net.encoder = MODELS.build(dict(lstm, type='aft_mm.SequenceEncoder'))
    refuses_input('inputs of any length, got LSTM', Transcriber, net, 'c.py')
    arch = dict(embed_dims=D, num_layers=2)
    net = AFTViT(arch, 12, 4, token_mixer=[SIMPLE, mixer('AFTLocal')])
    refuses_input('--dynamic needs one of the mixers .* got AFTLocal', check_any_size, net)
