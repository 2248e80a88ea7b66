"""Unmodified tools of mmpretrain, timm and mmengine on our models."""

import importlib.util

import numpy as np
import pytest
import torch
from mmengine.analysis import get_model_complexity_info
from mmengine.config import Config
from mmengine.registry import DefaultScope
from mmpretrain import FeatureExtractor
from mmpretrain import get_model as mmpretrain_get_model
from mmpretrain.apis import ModelHub

from aft_mm.apis import get_model, list_models, load_model, register_models
from aft_mm.config.finding import install_root, trained_models
from aft_mm.errors import UserError
from aft_mm.models import AFTViT

from ..errors import refuses_input, refuses_value

NAME = 'aft-conv-mini-h96-k7_1xb100-8e_cifar10'
SIMPLE = dict(type='aft_mm.AFTSimple')


@pytest.fixture(autouse=True)
def scope_of_mmpretrain():
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        yield


def test_features_by_mmpretrain(tiny_classifier):
    extract = FeatureExtractor(tiny_classifier[0], pretrained=tiny_classifier[1], device='cpu')
    image = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    ((feature,), (again,)) = extract([image, image], batch_size=2, stage='backbone')
    _, model = load_model(*tiny_classifier, 'cpu')
    pixels = torch.tensor(image).permute(2, 0, 1)[None]
    (expected,) = model.extract_feat(model.data_preprocessor(dict(inputs=pixels))['inputs'])
    assert feature.shape == (16,) and torch.equal(feature, again)
    torch.testing.assert_close(feature, expected[0])


class TestNames:
    def test_our_models_are_registered_in_mmpretrain_on_request(self, root, monkeypatch):
        assert NAME in list_models() and list_models('*_cifar10') == [
            name for name in list_models() if '_cifar10' in name
        ]
        assert type(mmpretrain_get_model(NAME).backbone).__name__ == 'AFTViT'

        calls = []
        monkeypatch.setattr(ModelHub, 'register_model_index', lambda *a, **b: calls.append(a))
        spec = importlib.util.spec_from_file_location(
            'aft_mm.apis.models_again', root / 'aft_mm/apis/loading.py'
        )
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert not calls  # after the import
        assert module.list_models() == module.list_models() == list_models()
        assert len(calls) == 1

    def test_a_model_by_name_with_and_without_weights(self, tmp_path):
        model = get_model(NAME)
        torch.manual_seed(1)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        meta = dict(dataset_meta=dict(classes=tuple('abcdefghij')))
        torch.save(dict(state_dict=model.state_dict(), meta=meta), tmp_path / 'a.pth')
        loaded = get_model(NAME, pretrained=tmp_path / 'a.pth', device='cpu')
        for name, value in loaded.state_dict().items():
            assert torch.equal(value, model.state_dict()[name]), name
        assert loaded.dataset_meta == meta['dataset_meta'] and not loaded.training
        assert all(parameter.requires_grad for parameter in loaded.parameters())
        (feature,) = FeatureExtractor(loaded)(np.zeros((32, 32, 3), np.uint8))[0]
        assert feature.shape == (96,)

    def test_released_weights_are_loaded_on_request(self, tmp_path, monkeypatch):
        with pytest.raises(
            UserError, match=f'{NAME} has no released weights; .*weights: '
        ) as error:
            get_model(NAME, pretrained=True)
        released = str(error.value).partition('weights: ')[2].split(', ')
        assert sorted(released) == sorted(model.config for model in trained_models().values())
        with pytest.raises(ValueError, match='name must be a string that is not empty, got None'):
            get_model(None)
        refuses_value('pretrained', get_model, NAME, pretrained=1)
        refuses_input('device must be one of this machine', get_model, NAME, device='banana')
        refuses_value('pattern', list_models, 3)
        model = get_model(NAME)
        torch.save(dict(state_dict=model.state_dict()), tmp_path / 'a.pth')
        monkeypatch.setattr(register_models()[NAME], 'weights', str(tmp_path / 'a.pth'))
        loaded = get_model(NAME, pretrained=True)
        for name, value in loaded.state_dict().items():
            assert torch.equal(value, model.state_dict()[name]), name
        with pytest.raises(UserError, match=f'no released weights; models with weights: .*{NAME}'):
            get_model('aft-local-32-mini_1xb16-2e_mnist', pretrained=True)

    def test_a_part_of_a_name_and_a_model_of_another_task(self):
        assert get_model('conv-quickstart')._metainfo.name.startswith('aft-conv-quickstart_')
        assert type(get_model('aft-local-32-mini_1xb16-2e_mnist')).__name__ == 'AutoregressiveModel'

    def test_a_host_without_its_configs_is_named(self, tmp_path, monkeypatch):
        monkeypatch.setattr('aft_mm.config.finding.PACKAGE', tmp_path / 'aft_mm')
        install_root.cache_clear()
        with pytest.raises(UserError, match='install aft_mm from a wheel that holds them'):
            register_models.__wrapped__()

    @pytest.mark.parametrize(
        ('name', 'checkpoint', 'message'),
        [
            ('aft-conv', None, "config 'aft-conv' must be part of one name, got .*: aft-conv-"),
            (NAME.replace('h96', 'h9'), None, f'did you mean .*{NAME}'),
            (NAME, 'no.pth', "checkpoint 'no.pth' does not exist"),
        ],
    )
    def test_unknown_names_are_rejected(self, name, checkpoint, message):
        with pytest.raises(UserError, match=message):
            get_model(name, checkpoint)


class TestTimm:
    @pytest.fixture
    def backbone(self):
        torch.manual_seed(0)
        arch = dict(embed_dims=8, num_layers=3)
        return AFTViT(arch, img_size=(8, 12), patch_size=4, token_mixer=SIMPLE).eval()

    def test_features_by_the_timm_wrapper(self, backbone):
        features = pytest.importorskip('timm.models._features', reason='timm wraps the backbone')
        image = torch.randn(2, 3, 8, 12)
        wrapped = features.FeatureGetterNet(backbone, out_indices=(0, 2), norm=True, prune=False)
        assert wrapped.feature_info.channels() == [8, 8]
        assert wrapped.feature_info.reduction() == [4, 4]
        for name in wrapped.feature_info.module_name():
            assert backbone.get_submodule(name) is not None
        outputs = wrapped(image)
        sizes = dict(img_size=(8, 12), patch_size=4, token_mixer=SIMPLE, out_type='featmap')
        full = AFTViT(dict(embed_dims=8, num_layers=3), out_indices=(0, 2), **sizes).eval()
        full.load_state_dict(backbone.state_dict())
        first, last = full(image)
        assert outputs[0].shape == first.shape == (2, 8, 2, 3)
        torch.testing.assert_close(outputs[1], last)
        expected = backbone.norm(first.flatten(2).mT).mT.view_as(first)
        torch.testing.assert_close(outputs[0], expected)

    def test_arguments_of_the_timm_wrapper(self):
        torch.manual_seed(0)
        mixer = dict(type='aft_mm.SoftmaxAttention', num_heads=2)
        options = dict(img_size=8, patch_size=4, with_cls_token=True, out_type='cls_token')
        model = AFTViT(dict(embed_dims=8, num_layers=3), token_mixer=mixer, **options).eval()
        image = torch.randn(2, 3, 8, 8)
        final, pairs = model.forward_intermediates(
            image, indices=2, return_prefix_tokens=True, output_fmt='NLC'
        )
        torch.testing.assert_close(final[:, 0], model(image)[0])
        assert [feature.shape for feature, _ in pairs] == [(2, 4, 8)] * 2
        tokens = torch.cat([pairs[1][1], pairs[1][0]], dim=1)
        torch.testing.assert_close(model.norm(tokens), final)
        calls = []
        handle = model.layers[2].register_forward_hook(lambda *_: calls.append(2))
        stopped, _ = model.forward_intermediates(image, indices=[0, -2], stop_early=True)
        assert not calls
        torch.testing.assert_close(stopped[:, 1:], model.norm(pairs[0][0]))
        assert len(model.forward_intermediates(image, intermediates_only=True)) == 3
        handle.remove()
        model.use_bfloat16 = True  # inside; the output is float32, as for forward
        final, features = model.forward_intermediates(image)
        assert {t.dtype for t in (final, *features)} == {torch.float32}
        for wrong in (dict(indices=4), dict(indices=[3]), dict(output_fmt='NHWC')):
            with pytest.raises(ValueError, match=next(iter(wrong))):
                model.forward_intermediates(image, **wrong)


def test_mmengine_counts_fewer_flops_than_our_tool(tool, tiny_classifier):
    """As described in docs/analysis.md; if this fails, update one of them."""
    analyse = tool('complexity').analyse
    backbone = Config.fromfile(tiny_classifier[0]).model.backbone
    model = AFTViT(**{name: value for name, value in backbone.items() if name != 'type'}).eval()
    ours = analyse(model, (3, 8, 12))
    theirs = get_model_complexity_info(model, (3, 8, 12), show_table=False, show_arch=False)
    assert theirs['params'] == ours['parameters']
    assert theirs['flops'] < ours['flops']
