"""``aft_mm export``: graphs equal the model at every size."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope, init_default_scope
from mmengine.runner import Runner
from torch import nn

from aft_mm.apis import load_model
from aft_mm.export.files import OnnxFile, TorchFile
from aft_mm.ops.native import availability

from ..errors import stops
from ..helpers import ROOT, command, load_script, nightly
from ..test_documents import pack
from .runtimes import MISSING, open_onnx, open_openvino

pytestmark = pytest.mark.slow

needs_onnx = pytest.mark.skipif(bool(MISSING), reason=f'{", ".join(MISSING)} not installed')
CONV = "dict(type='aft_mm.AFTConv', num_heads=4, kernel_size=5)"
WINDOW = "dict(type='aft_mm.AFTConv', num_heads=4, kernel_size=3, global_connectivity=False)"
FULL = "dict(type='aft_mm.AFTFull', rank=4)"
LOCAL = "dict(type='aft_mm.AFTLocal', rank=4, window=3)"
SOFTMAX = "dict(type='aft_mm.SoftmaxAttention', num_heads=4)"
CLS = "with_cls_token=True, out_type='cls_token'"
MODEL = """
default_scope = 'mmpretrain'
custom_imports = dict(imports=['aft_mm.registry'], allow_failed_imports=False)
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='aft_mm.AFTViT', arch=dict(embed_dims=24, num_layers={layers}), img_size=(32, 48),
        patch_size=8, token_mixer={mixer}, {options}),
    head=dict(type='LinearClsHead', num_classes=5, in_channels=24))
"""
export = command('export')
# Smaller and larger than the 4 x 6 patches of the config, and with incomplete patches.
OTHER_SIZES = [(48, 32), (40, 56), (25, 35), (9, 48)]


@pytest.fixture
def files(tmp_path):
    """Config, checkpoint and model, whose first layer has keys of hundreds and biases below -3."""

    def make(mixer, options='position_embedding=False', layers=1):
        text = MODEL.format(mixer=mixer, options=options, layers=layers)
        (tmp_path / 'config.py').write_text(text)
        config = Config.fromfile(tmp_path / 'config.py')
        init_default_scope('mmpretrain')
        torch.manual_seed(0)
        model = MODELS.build(config.model).eval()
        for name, parameter in model.named_parameters():
            large = 'token_mixer.key' in name and 'Softmax' not in mixer
            nn.init.normal_(parameter, std=50.0 if large else 0.3)
            if name.endswith('layers.0.token_mixer.pos_bias.gamma'):
                nn.init.constant_(parameter, 4.0)
        torch.save(dict(meta={}, state_dict=model.state_dict()), tmp_path / 'model.pth')
        return str(tmp_path / 'config.py'), str(tmp_path / 'model.pth'), model

    return make


def outputs_of(path, image, loops):
    if path.suffix == '.xml':
        found = open_openvino(path, loops)({'image': image.numpy()}).values()
    else:
        found = open_onnx(path, loops).run(None, {'image': image.numpy()})
    return [torch.from_numpy(part) for part in found]


def maps(model, image):
    model.backbone.out_type = 'featmap'
    return model.backbone(image)


CASES = {
    'conv': (CONV, 'position_embedding=False', []),
    'conv-maps-any-size': (CONV, 'out_indices=(0, 1)', ['--dynamic', '--backbone']),
    'conv-loops': (CONV, 'position_embedding=False', ['--loops']),
    'conv-loops-any-size': (CONV, 'position_embedding=False', ['--loops', '--dynamic']),
    'openvino-conv-maps-any-size': (CONV, 'out_indices=(0, 1)', ['--dynamic', '--backbone']),
    'openvino-conv-loops-any-size': (CONV, 'with_cls_token=False', ['--loops', '--dynamic']),
    'full-maps': (FULL, CLS, ['--backbone']),
    'full-any-size': (FULL, CLS, ['--dynamic']),
    'deit': (SOFTMAX, CLS, []),
}


@needs_onnx
@pytest.mark.parametrize(
    'case',
    nightly(
        CASES,
        [
            'conv',
            'conv-loops',
            'conv-maps-any-size',
            'openvino-conv-maps-any-size',
            'full-any-size',
        ],
    ),
)
def test_a_graph_equals_the_model(case, files, tmp_path, capsys):
    mixer, options, words = CASES[case]
    suffix, about, library = '.onnx', 'ONNX opset 20', tmp_path / 'model.loops.so'
    if case.startswith('openvino'):
        pytest.importorskip('openvino', reason='openvino runs the exported graph')
        suffix, about, library = '.xml', 'OpenVINO', tmp_path / 'model.openvino.so'
    # The second layer of AFT-conv takes another form than the first.
    config, checkpoint, model = files(mixer, options, layers=2 if mixer == CONV else 1)
    out = tmp_path / f'model{suffix}'
    library.touch()  # of an earlier export
    export([config, checkpoint, str(out), *words])
    shown = capsys.readouterr().out
    assert f'{out}: {about}' in shown and shown.endswith(
        f'; metadata in {out.with_suffix(".json")}\n'
    )
    assert library.exists() == ('--loops' in words)
    if case.startswith('conv-loops'):
        import onnx

        kinds = [node.op_type for node in onnx.load(out).graph.node]
        assert kinds.count('AFTConv') == 2
    shapes = [(2, 3, *size) for size in OTHER_SIZES] if '--dynamic' in words else []
    for shape in [(1, 3, 32, 48), *shapes]:
        image = torch.randn(*shape)
        with torch.no_grad():
            expected = maps(model, image) if '--backbone' in words else [model(image)]
        found = outputs_of(out, image, '--loops' in words)
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert theirs.abs().max() > 0.1
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@needs_onnx
@pytest.mark.parametrize('name', nightly(['m.onnx', 'm.xml'], ['m.xml']))
def test_loops_are_found_in_the_current_folder(name, files, tmp_path, monkeypatch):
    if name == 'm.xml':
        pytest.importorskip('openvino', reason='openvino runs the exported graph')
    config, checkpoint, _ = files(CONV)
    monkeypatch.chdir(tmp_path)
    export([config, checkpoint, name, '--loops'])  # compares the graph with the model
    assert len(list(tmp_path.glob('m.*.so'))) == 1


@pytest.mark.nightly
def test_torch_export_equals_the_model_at_any_size(files, tmp_path):
    config, checkpoint, model = files(WINDOW)
    out = tmp_path / 'model.pt2'
    export([config, checkpoint, str(out), '--dynamic', '--size', '40', '32'])
    program = torch.export.load(out).module()
    for size in OTHER_SIZES:
        image = torch.randn(3, 3, *size)
        with torch.no_grad():
            torch.testing.assert_close(program(image)[0], model(image), atol=1e-4, rtol=0)


DECODER = """
default_scope = 'aft_mm'
custom_imports = dict(imports=['aft_mm.registry'], allow_failed_imports=False)
model = dict(
    type='aft_mm.AutoregressiveModel',
    decoder=dict(
        type='aft_mm.SequenceDecoder', embed_dims=12, num_layers=2, grid=(20,),
        embedding=dict(type='aft_mm.TokenEmbedding', vocab_size=11), token_mixer={mixer}),
    head=dict(type='aft_mm.{head}', embed_dims=12, {values}))
"""
CTC = """
default_scope = 'aft_mm'
custom_imports = dict(imports=['aft_mm.registry'], allow_failed_imports=False)
model = dict(
    type='aft_mm.CTCModel',
    encoder=dict(
        type='aft_mm.SequenceEncoder', embed_dims=12, num_layers=1, grid=(20,),
        embedding=dict(type='aft_mm.ConvFrameEmbedding', num_features=5),
        token_mixer={mixer}),
    head=dict(type='aft_mm.CTCHead', embed_dims=12, num_classes=6))
"""


def save(folder, text):
    """Write config and checkpoint of a sequence model with large weights, and return the model.

    Positions are larger, so that greedy tokens differ.
    """
    (folder / 'config.py').write_text(text)
    torch.manual_seed(0)
    model = MODELS.build(Config.fromfile(folder / 'config.py').model).eval()
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=30.0 if 'position_embedding' in name else 0.5)
    torch.save(dict(meta={}, state_dict=model.state_dict()), folder / 'model.pth')
    return str(folder / 'config.py'), str(folder / 'model.pth'), model


@needs_onnx
@pytest.mark.parametrize(
    'mixer, layers',
    [
        ("[dict(type='aft_mm.AFTLocal', window=4, rank=3), dict(type='aft_mm.AFTSimple')]", 2),
        pytest.param(
            "dict(type='aft_mm.SoftmaxAttention', num_heads=3)", 2, marks=pytest.mark.nightly
        ),
    ],
    ids=['local and simple', 'softmax'],
)
def test_a_loop_without_torch_continues_prompts_like_the_model(
    mixer, layers, tmp_path, monkeypatch, capsys
):
    import onnxruntime

    values = 'num_classes=11'
    text = DECODER.format(mixer=mixer, head='CategoricalHead', values=values)
    text = text.replace('num_layers=2', f'num_layers={layers}')
    config, checkpoint, model = save(tmp_path, f'{text}\nimage_shape = (4, 5, 1)\n')
    export([config, checkpoint, str(tmp_path / 'model.onnx'), '--steps'])
    about = json.loads((tmp_path / 'model-prompt.json').read_text())
    assert about['image_shape'] == [4, 5, 1] and about['longest_prompt'] == 19
    paths = [str(tmp_path / f'model-{name}.onnx') for name in ('prompt', 'step')]
    sessions = [onnxruntime.InferenceSession(path) for path in paths]
    loop = load_script('examples/generate_onnx')
    for length in (1, 6):
        prompts = torch.randint(11, (1, length))
        expected = model.generate(20, prompts, greedy=True)
        assert len(expected[:, length:].unique()) > 1
        assert loop.generate(*sessions, prompts.numpy(), 20).tolist() == expected.tolist()
    for length, message in (
        (21, 'length must be 3 to 20, got 21'),
        (6, 'the tokens must be bytes of text, got the files of an image model'),
    ):
        monkeypatch.setattr(sys, 'argv', ['', *paths, 'ab', str(length)])
        with pytest.raises(SystemExit):
            runpy.run_path(str(ROOT / 'examples/generate_onnx.py'), run_name='__main__')
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    'suffix', ['pt2', pytest.param('xml', marks=[needs_onnx, pytest.mark.nightly])]
)
def test_a_ctc_graph_equals_the_model_at_any_length(suffix, tmp_path):
    config, checkpoint, model = save(tmp_path, CTC.format(mixer="dict(type='aft_mm.AFTSimple')"))
    path = tmp_path / f'model.{suffix}'
    if suffix == 'xml':
        pytest.importorskip('openvino', reason='openvino runs the exported graph')
    export([config, checkpoint, str(path)])
    for length in (4, 17):
        frames, mask = torch.randn(3, length, 5), torch.ones(3, length, dtype=torch.bool)
        if suffix == 'pt2':
            (found,) = torch.export.load(path).module()(frames, mask)
        else:
            inputs = dict(frames=frames.numpy(), mask=mask.numpy())
            (found,) = map(torch.from_numpy, open_openvino(path)(inputs).values())
        torch.testing.assert_close(found, model(frames), atol=1e-4, rtol=0)


@needs_onnx
@pytest.mark.parametrize(
    'words',
    [
        pytest.param([], marks=pytest.mark.nightly, id='alone'),
        pytest.param(['--loops'], id='loops'),
    ],
)
def test_int8_shrinks_the_file_and_rounds_the_outputs(words, tmp_path, capsys):
    # A padded graph, whose weights are larger than its operators.
    text = CTC.format(mixer="dict(type='aft_mm.AFTConv', num_heads=3, kernel_size=5)")
    config, checkpoint, model = save(tmp_path, text.replace('=12', '=96'))
    export([config, checkpoint, str(tmp_path / 'model.onnx'), '--int8', *words])
    ratio = float(re.search(r'int8: ([\d.]+) x the bytes', capsys.readouterr().out)[1])
    assert 0.25 < ratio < 0.7
    session = open_onnx(tmp_path / 'model.onnx', bool(words))
    frames = torch.randn(2, 13, 5)
    mask = torch.ones(2, 13, dtype=torch.bool)
    (found,) = session.run(None, dict(frames=frames.numpy(), mask=mask.numpy()))
    change = (torch.from_numpy(found) - model(frames)).std() / model(frames).std()
    assert 1e-4 < change < 0.1


@pytest.mark.nightly
@needs_onnx
def test_loops_of_openvino_in_bfloat16_round_their_inputs(files, tmp_path, capsys):
    openvino = pytest.importorskip('openvino', reason='OpenVINO runs OUT.xml')
    if 'BF16' not in openvino.Core().get_property('CPU', 'OPTIMIZATION_CAPABILITIES'):
        pytest.skip('OpenVINO computes in float32 on this processor, which has no bfloat16')
    config, checkpoint, _ = files(CONV)
    outputs, image = [], torch.randn(1, 3, 32, 48)
    for name, words in (('exact', []), ('rounded', ['--bfloat16'])):
        out = tmp_path / f'{name}.xml'
        export([config, checkpoint, str(out), '--loops', *words])
        outputs.append(outputs_of(out, image, loops=True)[0])
    exact, rounded = (torch.as_tensor(x) for x in outputs)
    change = (rounded - exact).std() / exact.std()
    assert 1e-5 < change < 1e-2
    assert 'bfloat16: outputs change by 0.' in capsys.readouterr().out


@pytest.mark.nightly
@needs_onnx
def test_int8_of_openvino_knows_the_ranges_of_images(tmp_path, capsys):
    pytest.importorskip('nncf', reason='NNCF quantises for OpenVINO')
    if torch.backends.cpu.get_cpu_capability() != 'AVX512':
        pytest.skip('int8 products saturate on a processor without VNNI, and the file is refused')
    text = "_base_ = 'aft_mm::image_classification/aft-conv-quickstart_1xb64-50e_digits.py'"
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        config, checkpoint, _ = save(tmp_path, text)
    out = tmp_path / 'model.xml'
    export([config, checkpoint, str(out), '--int8', '--loops'])
    assert 0.25 < float(re.search(r'int8: ([\d.]+) x', capsys.readouterr().out)[1]) < 0.7
    compiled = open_openvino(out, loops=True)
    dataset = Runner.build_dataloader(Config.fromfile(config).test_dataloader).dataset
    items = [dataset[index] for index in range(50)]
    _, model = load_model(config, checkpoint, device='cpu')
    pixels = model.data_preprocessor(dict(inputs=[item['inputs'] for item in items]), False)
    images = pixels['inputs']
    parts = [torch.from_numpy(compiled(image.numpy())[0].copy()) for image in images.split(1)]
    found = torch.cat(parts)
    change = (found - model(images)).std() / model(images).std()
    assert 1e-4 < change < 0.1
    stops(
        '--int8 for OUT.xml needs a classifier .* no --size',
        export,
        [config, checkpoint, str(out), '--int8', '--size', '8', '8'],
    )


def test_metrics_of_the_file_are_those_of_the_config(tmp_path, capsys):
    text = (
        "_base_ = 'aft_mm::image_classification/aft-conv-quickstart_1xb64-50e_digits.py'\n"
        'test_dataloader = dict(batch_size=7, dataset=dict(indices=50))\n'
        'model = dict(backbone=dict(arch=dict(num_layers=1)))\n'
    )
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        config, checkpoint, model = save(tmp_path, text)
    export([config, checkpoint, str(tmp_path / 'model.pt2'), '--test'])
    right, loaded = 0, Config.fromfile(config)
    settings = dict(loaded.data_preprocessor, type='mmpretrain.ClsDataPreprocessor')
    preprocess = MODELS.build(settings)
    for item in Runner.build_dataloader(loaded.test_dataloader).dataset:
        image = preprocess(dict(inputs=item['inputs'][None]), False)['inputs']
        right += int(model(image).argmax() == item['data_samples'].gt_label)
    expected = f'50 test images: accuracy/top1 {2 * right:.2f} -> {2 * right:.2f}'
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    'text, words, message',
    [
        (
            DECODER.format(
                mixer="dict(type='aft_mm.AFTSimple')",
                head='LogisticMixtureHead',
                values='num_channels=1',
            ).replace("TokenEmbedding', vocab_size=11", "PixelEmbedding', num_channels=1"),
            ['--steps'],
            'must be aft_mm.CategoricalHead, got LogisticMixtureHead',
        ),
        (
            CTC.format(mixer="dict(type='aft_mm.AFTSimple')"),
            ['--dynamic'],
            '--dynamic is for images',
        ),
        (
            DECODER.format(
                mixer="dict(type='aft_mm.AFTConv', num_heads=2, kernel_size=3)",
                head='CategoricalHead',
                values='num_classes=11',
            ),
            ['--steps', '--loops'],
            '--loops must be left out with --steps',
        ),
    ],
    ids=['head', 'option', 'loops'],
)
def test_sequence_models_without_a_graph_are_refused(text, words, message, tmp_path):
    config, checkpoint, _ = save(tmp_path, text)
    out = tmp_path / ('model.onnx' if '--loops' in words else 'model.pt2')
    stops(message, export, [config, checkpoint, str(out), *words])
    assert not list(tmp_path.glob(f'*{out.suffix}'))


def test_missing_loops_are_named_before_any_work(files, tmp_path, monkeypatch):
    config, checkpoint, _ = files(CONV, layers=2)
    monkeypatch.setattr(availability, 'library_path', lambda *kinds: tmp_path / 'none.so')
    stops(
        'the library of AFT-conv for ONNX Runtime was built from other sources',
        export,
        [config, checkpoint, str(tmp_path / 'm.onnx'), '--loops'],
    )
    pytest.importorskip('openvino', reason='openvino runs the exported graph')
    words = [config, checkpoint, str(tmp_path / 'm.xml'), '--loops']
    monkeypatch.setenv('PATH', '')
    monkeypatch.delenv('CXX', raising=False)
    stops('--loops for OUT.xml needs a C\\+\\+ compiler', export, words)
    monkeypatch.setenv('CXX', '/bin/false')
    stops('the loops for OpenVINO do not compile: /bin/false', export, words)
    assert not list(tmp_path.glob('m.*'))


@pytest.mark.parametrize(
    'mixer, words, message',
    [
        (CONV, ['model.bin'], 'OUT must end in .onnx or .xml or .pt2'),
        (CONV, ['m.pt2', '--dynamic', '--size', '8', '32'], '--size must be at least 9, got 8 32'),
        (CONV, ['m.pt2', '--int8'], 'OUT for --int8 must end in .onnx or .xml'),
        (CONV, ['m.pt2', '--loops'], 'OUT for --loops must end in .onnx or .xml'),
        (CONV, ['m.onnx', '--loops', '--bfloat16'], "--bfloat16 needs --loops and OUT.xml, got '"),
        (CONV, ['m.xml', '--bfloat16'], "--bfloat16 needs --loops and OUT.xml, got '"),
        (SOFTMAX, ['m.onnx', '--loops'], 'with loops needs AFT-conv .* got none'),
        (WINDOW, ['m.onnx', '--loops'], 'with loops needs AFT-conv .* got none'),
        (CONV, ['m.pt2', '--test'], '--test needs a classifier and a test_dataloader'),
    ],
)
def test_bad_arguments_are_rejected(mixer, words, message, files, tmp_path):
    config, checkpoint, _ = files(mixer)
    stops(message, export, [config, checkpoint, str(tmp_path / words[0]), *words[1:]])
    assert not (tmp_path / words[0]).exists()


def test_models_without_a_graph_are_refused_before_the_checkpoint_is_read(tmp_path):
    (tmp_path / 'model.pth').write_text('no checkpoint')
    image = MODEL.format(mixer=LOCAL, options='', layers=1)
    linear, lsh = (
        f"dict(type='aft_mm.{name}', num_heads=3)" for name in ('LinearAttention', 'LSHAttention')
    )
    steps = DECODER.format(mixer=linear, head='CategoricalHead', values='num_classes=11')
    for text, words, message in (
        (image, ['--dynamic'], '--dynamic needs one of the mixers AFTConv.* got AFTLocal'),
        (image, ['--size', '7', '32'], '--size must be at least 8, got 7 32'),
        (steps, ['--steps'], 'must be one of AFTConv, .* with a state, got LinearAttention'),
        (CTC.format(mixer=lsh), [], 'inputs of any length, got LSHAttention'),
        (CTC.format(mixer="dict(type='aft_mm.LSTM')"), [], 'inputs of any length, got LSTM'),
    ):
        (tmp_path / 'config.py').write_text(text)
        names = [str(tmp_path / name) for name in ('config.py', 'model.pth', 'model.pt2')]
        stops(message, export, [*names, *words])


def test_another_backbone_and_missing_packages_are_refused(files, tmp_path, monkeypatch):
    config, checkpoint, _ = files(CONV)
    monkeypatch.setattr(OnnxFile, 'packages', ('no_such_package',))
    words = [config, checkpoint, str(tmp_path / 'model.onnx')]
    stops('needs no_such_package: pip install onnx', export, words)
    path = Path(config)
    path.write_text(path.read_text().replace('aft_mm.AFTViT', 'VisionTransformer'))
    words[2] = str(tmp_path / 'model.pt2')
    stops('backbone aft_mm.AFTViT or be a text .*, got VisionTransformer', export, words)


def test_a_detector_is_refused_without_its_backbone(files, tmp_path):
    config, checkpoint, _ = files(CONV)
    path = Path(config)
    path.write_text(path.read_text().replace("'ImageClassifier'", "'mmdet.FasterRCNN'"))
    words = [config, str(tmp_path / 'no.pth'), str(tmp_path / 'model.pt2')]
    stops(r"no\.pth' does not exist", export, [*words, '--backbone'])
    words[1] = checkpoint
    stops(r'must be one of .*, got mmdet.FasterRCNN; use --backbone$', export, words)


def exported(folder, name, *words):
    pack(folder, name)
    files = str(folder / 'config.py'), str(folder / 'checkpoint.pth')
    export([*files, str(folder / 'model.pt2'), *words])
    return torch.export.load(folder / 'model.pt2').module(), load_model(*files, 'cpu')[1]


def test_a_text_model_gives_the_probability_of_every_byte(tmp_path):
    graph, model = exported(tmp_path, 'tiny_text')
    tokens = torch.randint(256, (1, 32))
    (scores,) = graph(tokens)
    (sample,) = model(tokens, mode='predict')
    nats = nn.functional.cross_entropy(scores[0], tokens[0], reduction='sum')
    assert sample.num_dims == 32 and nats.item() == pytest.approx(sample.nats, rel=1e-5)
    words = [str(tmp_path / name) for name in ('config.py', 'checkpoint.pth', 'a.pt2')]
    with pytest.raises(SystemExit, match='a text model has one length and no --dynamic'):
        export([*words, '--dynamic'])


@pytest.mark.nightly
@needs_onnx
def test_float64_sums_are_finite_in_onnx(tmp_path):
    """The exporter writes constants as float32, in which the lowest float64 is −inf."""
    pack(tmp_path, 'tiny_text')
    words = [str(tmp_path / name) for name in ('config.py', 'checkpoint.pth', 'model.onnx')]
    export(words)
    assert (tmp_path / 'model.onnx').exists()


def test_a_segmentor_gives_the_scores_of_every_pixel(tmp_path):
    pytest.importorskip('mmseg', reason='mmseg has the segmentor')
    graph, model = exported(tmp_path, 'tiny_segmentation', '--size', '40', '56')
    image = torch.randn(1, 3, 40, 56)
    (scores,) = graph(image)
    inputs = torch.cat([image, torch.ones(1, 1, 40, 56)], 1)
    (sample,) = model(inputs, mode='predict')
    torch.testing.assert_close(scores[0], sample.seg_logits.data, atol=1e-4, rtol=1e-4)


@pytest.mark.nightly
def test_a_detector_gives_the_boxes_of_mmdet(tmp_path):
    mmdet = pytest.importorskip('mmdet.structures', reason='mmdet has the detector')
    pack(tmp_path, 'tiny_detection', lambda config: config.model.test_cfg.update(max_per_img=30))
    files = [str(tmp_path / name) for name in ('config.py', 'checkpoint.pth')]
    checkpoint = torch.load(files[1])
    for name, tensor in checkpoint['state_dict'].items():
        if 'retina_' in name:  # so that scores are below 1, and boxes of the size of anchors
            tensor.mul_(0.1)
    torch.save(checkpoint, files[1])
    export([*files, str(tmp_path / 'model.pt2'), '--size', '48', '64'])
    _, model = load_model(*files, 'cpu')
    image, mask = torch.randn(1, 3, 48, 64), torch.ones(1, 1, 48, 64)
    boxes, scores, labels = torch.export.load(tmp_path / 'model.pt2').module()(image)
    size = dict(img_shape=(48, 64), scale_factor=(1, 1), batch_input_shape=(48, 64))
    for threshold in (0.0, scores.quantile(0.6).item()):
        model.bbox_head.test_cfg.score_thr = threshold
        samples = [mmdet.DetDataSample(metainfo=size)]
        (sample,) = model(torch.cat([image, mask], 1), samples, mode='predict')
        found, count = sample.pred_instances, int((scores > threshold).sum())
        assert len(found) == count and count > 3
        torch.testing.assert_close(scores[:count], found.scores, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(boxes[:count], found.bboxes, atol=1e-2, rtol=1e-3)
        assert labels[:count].equal(found.labels)


def test_maps_are_those_of_whole_images(files, tmp_path):
    config, checkpoint, model = files(CONV, 'with_mask_channel=True')
    out = tmp_path / 'model.pt2'
    export([config, checkpoint, str(out), '--backbone'])
    image = torch.randn(1, 3, 32, 48)
    with torch.no_grad():
        (expected,) = maps(model, torch.cat([image, torch.ones(1, 1, 32, 48)], dim=1))
        (found,) = torch.export.load(out).module()(image)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_a_graph_that_does_not_run_is_removed(files, tmp_path, monkeypatch):
    config, checkpoint, _ = files(CONV)

    def load(file, graph):
        assert file.path.exists()
        raise RuntimeError('no such operator\nat ...')

    monkeypatch.setattr(TorchFile, 'load', load)
    words = [config, checkpoint, str(tmp_path / 'model.pt2')]
    stops('torch cannot run the graph, try .onnx or .xml: no such operator$', export, words)
    assert not (tmp_path / 'model.pt2').exists()


def test_a_graph_that_differs_from_the_model_is_removed(files, tmp_path, monkeypatch):
    config, checkpoint, _ = files(CONV)
    write = TorchFile.write

    def and_change(file, program, *words):
        write(file, program, *words)
        for parameter in program.parameters():
            parameter.data.add_(1.0)

    monkeypatch.setattr(TorchFile, 'write', and_change)
    with pytest.raises(SystemExit, match=r'differs from the model by .* input of 1 x 3 x 32 x 48'):
        export([config, checkpoint, str(tmp_path / 'model.pt2')])
    assert not (tmp_path / 'model.pt2').exists()
