"""Configs, FLOPs, position biases and reference values of tools/analysis_tools."""

import itertools
import json
import os

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from aft_mm.analysis.model_complexity import Likelihood, analyse, analyse_config, saved_memory
from aft_mm.analysis.reference_bits import ppmd_bits, sorted_points_bits

from ..errors import refuses_input, stops
from ..helpers import ROOT, command, only_error

TOOLS = ROOT / 'tools' / 'analysis_tools'
QUICKSTART = next((ROOT / 'configs' / 'image_classification').glob('aft-conv-quickstart_*.py'))


@pytest.fixture
def run(run):
    # Then mmengine logs the variable.
    env = dict(AFT_MM_DATA=os.environ.get('AFT_MM_DATA', 'data'))
    return lambda tool, *arguments: run(TOOLS / tool, *arguments, cwd=ROOT, env=env)


# A grid of tokens with 48 channels.
GRID, T, D = (6, 9), 54, 48
PROJECTIONS = 4 * T * D * D
# exp, product with v, two sums, quotient, sigmoid, gate.
WEIGHTED_MEAN = T * D * (1 + 1 + 2)
GATE = 3 * T * D
DENSE = T * T * (16 + 1) + 2 * T * T * D + 2 * T * D + GATE


@pytest.mark.parametrize(
    'mixer, least, most',
    [
        # Queries by keys, softmax, weights by values.
        (dict(type='SoftmaxAttention', num_heads=4), T * T * (2 * D + 5 * 4), None),
        (dict(type='AFTSimple'), WEIGHTED_MEAN + GATE, None),
        # u v^T, exp(w), and exp(w) by numerator and denominator.
        (dict(type='AFTFull', rank=16), DENSE, None),
        (dict(type='AFTFull', rank=None), DENSE - 16 * T * T, None),
        # A key of 12 channels, a 5 x 5 kernel on value and on key channels, and the two global sums.
        (
            dict(type='AFTConv', num_heads=12, kernel_size=5),
            (25 + 2 + 1) * T * (D + 12) - T * D * (D - 12) + GATE,
            None,
        ),
        (dict(type='AFTConv', num_heads=48, kernel_size=5), (25 + 2 + 1) * T * 2 * D + GATE, None),
        (
            dict(type='AFTConv', num_heads=12, kernel_size=5, query=False),
            (25 + 2 + 1) * T * (D + 12) - T * D * (D - 12) - T * D * D + T * D,
            None,
        ),
        # The biases of the 5 x 5 tokens |Δ| < 3, or a dense product, which is faster when T is
        # small.
        (dict(type='AFTLocal', window=3, rank=16), 25 * T * D + GATE, DENSE),
        (dict(type='AFTLocalLearned', window=3, rank=16), 25 * T * D + GATE, DENSE),
        # Eight sources, 4 in either block; columns, rows and blocks are added once where they
        # double.
        (
            dict(type='AFTLocalHard', window=(4, 4)),
            2 * (1 + 3) * T * D + GATE,
            2 * (1 + 7) * T * D + GATE,
        ),
        # Blocks of 3 x 3 tokens, which see as many on all sides as there are.
        (
            dict(type='LocalSoftmaxAttention', num_heads=4, window=3),
            2 * 9 * T * D,
            81 * T * (2 * D + 5 * 4),
        ),
    ],
)
def test_flops_are_those_of_the_formula_or_between_bounds(mixer, least, most):
    """Shifts against overflow and similar operations add at most 8 per cent."""
    module = MODELS.build(dict(mixer, type=f'aft_mm.{mixer["type"]}', embed_dims=D, grid=GRID))
    counted = analyse(module, (T, D))
    most = PROJECTIONS + (least if most is None else most)
    assert counted['uncounted'] == {}
    assert PROJECTIONS + least <= counted['flops'] <= 1.08 * most


def test_a_decoder_is_counted_on_its_whole_length_with_its_head(tmp_path):
    config = Config.fromfile(ROOT / 'tests/configs/tiny_text.py', import_custom_modules=False)
    length, dims, values = 300, 24, 100
    config.model.decoder.token_mixer = dict(type='aft_mm.AFTSimple')
    config.model.decoder.update(embed_dims=dims, grid=(length,))
    config.model.decoder.embedding.vocab_size = values
    config.model.head.update(embed_dims=dims, num_classes=values)
    config.custom_imports.imports = ['aft_mm.registry']
    config.dump(tmp_path / 'decoder.py')
    counted = analyse_config(tmp_path / 'decoder.py')

    projections, mean_and_gate = 4 * dims * dims, (4 + 3) * dims
    mlp, norms, residuals = (2 * 4 * dims + 4) * dims, 2 * 5 * dims, 2 * dims
    block = projections + mean_and_gate + mlp + norms + residuals
    # Positions, last norm, logits and cross entropy.
    expected = length * (2 * block + (1 + 5) * dims + values * dims + 5 * values)
    assert counted['shape'] == (length,) and counted['uncounted'] == {}
    assert expected <= counted['flops'] <= 1.03 * expected
    assert counted['parameters'] == sum(
        p.numel()
        for p in MODELS.build(dict(config.model, type='aft_mm.AutoregressiveModel')).parameters()
    )


def test_an_encoder_and_the_mixing_with_its_memory_are_counted_too():
    length, rows, dims, heads = 300, 35, 24, 3
    parts = dict(
        embed_dims=dims,
        embedding=dict(type='aft_mm.PixelEmbedding', num_channels=3),
        token_mixer=dict(type='aft_mm.AFTSimple'),
    )
    decoder = dict(parts, type='aft_mm.SequenceDecoder', num_layers=2, grid=(length,))
    head = dict(type='aft_mm.LogisticMixtureHead', embed_dims=dims, num_channels=3)
    alone = MODELS.build(dict(type='aft_mm.AutoregressiveModel', decoder=decoder, head=head))
    both = MODELS.build(
        dict(
            type='aft_mm.AutoregressiveModel',
            head=head,
            decoder=dict(
                decoder, cross_mixer=dict(type='aft_mm.SoftmaxAttention', num_heads=heads)
            ),
            encoder=dict(parts, type='aft_mm.SequenceEncoder', num_layers=1, grid=(5, 7)),
        )
    )
    before = analyse(Likelihood(alone), (length, 3), tokens=True)
    after = analyse(Likelihood(both), (length, 3), (rows, 3), tokens=True)

    block = (4 + 8) * dims * dims + (4 + 3 + 4 + 2 * 5 + 2) * dims
    encoder = rows * (3 * dims + block + (1 + 5) * dims)  # pixels, positions, the last norm
    projections = 2 * (length + rows) * dims * dims
    attention = length * rows * (2 * dims + 5 * heads) + length * (5 + 1) * dims
    expected = encoder + 2 * (projections + attention)
    assert after['uncounted'] == before['uncounted'] == {}
    assert expected <= after['flops'] - before['flops'] <= 1.03 * expected


@pytest.mark.parametrize(
    'name',
    [
        'image_ar/aft-local-32-mini_1xb8-2e-pixels_cifar10',
        'image_ar/aft-local-32-mini_1xb16-2e_mnist',
        'super_resolution/aft-local2d-mini_1xb8-16e_celeba-8to32',
        'point_cloud/aft-local-96-mini_1xb4-40e_modelnet10-chair',
    ],
)
def test_every_operator_of_images_and_points_is_counted(name, tmp_path):
    config = Config.fromfile(ROOT / f'configs/{name}.py')
    for part in filter(None, (config.model.decoder, config.model.get('encoder'))):
        part.num_layers = 1  # the others have the same operators
    config.dump(tmp_path / 'shallow.py')
    assert analyse_config(tmp_path / 'shallow.py')['uncounted'] == {}
    message = 'counted at the length of its grid'
    refuses_input(message, analyse_config, tmp_path / 'shallow.py', (8, 8))


def test_parameters_and_activations_of_a_known_network():
    class Tokens(torch.nn.Module):
        def forward(self, x):
            return x.sigmoid().flatten(2).transpose(1, 2)

    layers = torch.nn.Conv2d(3, 8, 3, padding=1), Tokens(), torch.nn.Linear(8, 5)
    counted = analyse(torch.nn.Sequential(*layers, torch.nn.Softmax(-1)), (3, 7, 4))
    assert counted['parameters'] == 3 * 8 * 9 + 8 + 8 * 5 + 5
    assert counted['flops'] == 28 * (8 * 27 + 8 + 8 * 5 + 5 * 5)
    assert counted['activations'] == 28 * (8 + 8 + 5 + 5)


def test_unknown_operators_are_reported():
    class Network(torch.nn.Module):
        def forward(self, x):
            return torch.erfinv(x) * x.numel()

    assert analyse(Network(), (4,))['uncounted'] == {'aten::erfinv': 1}


@pytest.fixture(scope='module')
def quickstart():
    return analyse_config(QUICKSTART)


def test_shape_is_that_of_the_config_or_the_one_given(quickstart):
    larger = analyse_config(QUICKSTART, (8, 24))
    assert quickstart['shape'] == (1, 8, 8) and larger['shape'] == (1, 8, 24)
    assert larger['parameters'] == quickstart['parameters']
    # Three times the tokens; linear except for the kernel, which exceeds the 4 x 4 grid.
    assert 2.95 < larger['flops'] / quickstart['flops'] < 4


def test_the_mask_channel_of_padding_is_off(quickstart, tmp_path):
    config = Config.fromfile(QUICKSTART)
    config.model.backbone.with_mask_channel = True
    config.dump(tmp_path / 'masked.py')
    assert analyse_config(tmp_path / 'masked.py') == dict(quickstart, config='masked')


def test_a_detector_with_boxes_of_its_own_is_not_counted(tmp_path):
    config = Config.fromfile(QUICKSTART)
    config.model.roi_head = dict(type='StandardRoIHead')
    config.dump(tmp_path / 'two_stages.py')
    path = tmp_path / 'two_stages.py'
    refuses_input('cannot be counted: the FLOPs of its roi_head', analyse_config, path)


def test_model_complexity_writes_its_table(tmp_path, capsys):
    command('complexity')([QUICKSTART, '--json', tmp_path / 'counts.json'])
    shown = capsys.readouterr().out
    assert QUICKSTART.stem in shown and 'Not counted' not in shown
    (counts,) = json.loads((tmp_path / 'counts.json').read_text())
    assert sum(counts['flops_by_operator'].values()) == counts['flops']
    assert counts['flops_by_module'][''] == counts['flops']
    assert counts['flops_by_module']['head.fc'] == 64 * 10


def test_print_config_prints_the_config_alone_with_what_is_inherited_and_overridden(run):
    config = QUICKSTART.with_name('aft-conv-mini-h96-k7_1xb100-8e_cifar10.py')
    done = run('print_config.py', config, '--cfg-options', 'train_cfg.max_epochs=7')

    assert done.returncode == 0, done.stderr
    assert 'AFT_MM_DATA' in done.stderr  # messages of mmengine
    printed = Config.fromstring(done.stdout, '.py')
    assert printed.train_cfg.max_epochs == 7
    assert printed.default_scope == 'mmpretrain' and '_base_' not in printed


def test_plot_position_bias_refuses_a_model_without_one(tmp_path):
    config = Config.fromfile(QUICKSTART)
    config.model.backbone.token_mixer = dict(type='aft_mm.AFTSimple')
    config.dump(tmp_path / 'simple.py')
    init_default_scope(config.default_scope)
    torch.save(dict(state_dict=MODELS.build(config.model).state_dict()), tmp_path / 'simple.pth')
    words = [tmp_path / 'simple.py', tmp_path / 'simple.pth', '--out', tmp_path / 'bias.png']
    stops('no token mixer with a position bias', command('plot bias'), words)
    assert not (tmp_path / 'bias.png').exists()


def test_a_missing_config_gives_a_one_line_message(tool):
    for name in ('analysis_tools/print_config', 'complexity'):
        stops("'no.py' does not exist", tool(name).main, ['no.py'])


def test_reference_bits_of_known_bytes(run, tmp_path):
    data = np.tile(np.frombuffer(b'ab', np.uint8), 500)
    data[-100:] = ord('c')  # only the test split
    path = tmp_path / 'text'
    path.write_bytes(data.tobytes())
    config = ROOT / 'configs/language_modeling/aft-local-32-mini_1xb16-6e_enwik8-t256.py'
    out = tmp_path / 'bits.json'
    for ratio, order_0 in ((0.1, 0.0), (0.5, 1.5219)):
        options = [
            f'test_dataloader.dataset.data_file={path}',
            'test_dataloader.dataset.context_length=16',
            f'test_dataloader.dataset.split_ratio=({1 - ratio},0.0,{ratio})',
        ]
        result = run('reference_bits.py', config, '--out', out, '--cfg-options', *options)
        assert result.returncode == 0, result.stderr
        bits = json.loads(out.read_text())
        assert bits['values'] == 1000 * ratio
        assert bits['order 0'] == pytest.approx(order_0, abs=1e-3)
    assert bits['xz -9'] < bits['order 0']


def test_ppmd_knows_the_training_part():
    pytest.importorskip('pyppmd', reason='pyppmd compresses the data of this test')
    known, other = (np.random.default_rng(seed).bytes(2000) for seed in (0, 1))
    assert ppmd_bits(known, known) < 0.2
    assert ppmd_bits(known, other) == pytest.approx(8, abs=0.5)


SHARES = np.array([[1, 2], [2, 1], [1.5, 1.5]]) / 3  # of the values 0 and 1, of z, y and x


def ideal_bits(cloud):
    return -np.log2([share[column] for share, column in zip(SHARES, cloud.T, strict=True)]).sum()


def order_bits(clouds):
    """Return what the order of the points is worth; histograms are those of the clouds."""
    columns = clouds.reshape(-1, 3).T
    own = -np.log2([(column == value).mean() for column in columns for value in column])
    return own.sum() - clouds.size * sorted_points_bits(clouds)


def test_the_bits_of_sorted_points_are_a_code_of_all_clouds():
    total = 0.0
    for cloud in itertools.combinations_with_replacement(itertools.product((0, 1), repeat=3), 3):
        clouds = np.array([cloud], dtype=np.uint8)
        total += 2 ** (order_bits(clouds) - ideal_bits(clouds[0]))
    assert total == pytest.approx(1)


def test_the_bits_of_points_in_order_of_z_are_a_code_of_all_sequences():
    """Sequences of three points with increasing z, and one of decreasing y: only z is sorted."""
    other = [(0, 1, 1), (0, 0, 1), (1, 0, 0)]  # two of them could be swapped
    total = 0.0
    for cloud in itertools.product(itertools.product((0, 1), repeat=3), repeat=3):
        clouds = np.array([cloud, other], dtype=np.uint8)
        if (np.diff(clouds[0, :, 0].astype(int)) >= 0).all():
            total += 2 ** (order_bits(clouds) - np.log2(3) - ideal_bits(clouds[0]))
    assert total == pytest.approx(1)


def test_reference_bits_of_point_clouds(run, tmp_path, pack):
    config = ROOT / 'configs/point_cloud/aft-local-96-mini_1xb4-40e_modelnet10-chair.py'
    option = f'test_dataloader.dataset.data_root={pack("modelnet10_pcd")}'
    words = [config, '--out', tmp_path / 'bits.json', '--cfg-options', option]
    result = run('reference_bits.py', *words)
    assert result.returncode == 0, result.stderr
    bits = json.loads((tmp_path / 'bits.json').read_text())
    assert bits['values'] == 40 * 1024 * 3
    # The order of distinct points is worth log2(1024!) / 3072 bits.
    assert 2 < bits['order 0'] - bits['sorted points'] < 3.5
    assert bits['sorted points'] < bits['xz -9'] < bits['order 0'] < 8


def test_reference_bits_refuse_a_classifier_and_name_an_image_of_another_size(run, untrained):
    done = run('reference_bits.py', QUICKSTART)
    assert 'must be the config of an autoregressive model' in only_error(done)
    option = 'test_dataloader.dataset.pipeline.0.image_shape=(8,9,1)'
    done = run('reference_bits.py', untrained['tiny_pixels'][0], '--cfg-options', option)
    assert 'image 0 must be uint8 of image_shape (8, 9, 1)' in only_error(done)


def test_saved_memory_is_that_of_the_whole_model_and_small_with_recomputation():
    def build(num_layers):
        decoder = dict(type='aft_mm.SequenceDecoder', embed_dims=8, num_layers=num_layers)
        decoder['embedding'] = dict(type='aft_mm.TokenEmbedding', vocab_size=5)
        decoder.update(token_mixer=dict(type='aft_mm.AFTSimple'), grid=(16,))
        head = dict(type='aft_mm.CategoricalHead', embed_dims=8, num_classes=5)
        model = MODELS.build(dict(type='aft_mm.AutoregressiveModel', decoder=decoder, head=head))
        return Likelihood(model)

    tokens = torch.zeros(1, 16, dtype=torch.long)
    counts = []
    for depth in (1, 2, 5):
        model = build(depth)
        counts.append(saved_memory(model, lambda model=model: model.loss(tokens)))
        assert len(model.decoder.layers) == depth
    one, two, five = counts
    assert five.saved - one.saved == 4 * (two.saved - one.saved) > 0
    assert five.recomputed - one.recomputed == 4 * 16 * 8 * 4  # the inputs of four more blocks
    assert one.recomputed > one.saved / 2


def test_saved_memory_counts_what_autograd_saves():
    linear = torch.nn.Linear(4, 4)
    x = torch.randn(3, 4)
    assert saved_memory(linear, lambda: linear(x).exp()) == (2 * 3 * 4 * 4, 2 * 3 * 4 * 4)
