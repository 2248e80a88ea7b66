"""The backbone in detectors and segmentors: padded batches, image sizes, precision, bad input."""

import pytest
import torch
from mmengine.model import ImgDataPreprocessor
from torch import nn

from aft_mm.models import AFTViT, MaskedDataPreprocessor, SimpleFeaturePyramid

from ..errors import refuses

ARCH = dict(embed_dims=12, num_layers=3, mlp_ratio=2)
SIZES = [(29, 44), (40, 16), (5, 51)]
NORMALIZE = dict(type='ImgDataPreprocessor', mean=[100, 120, 90], std=[60, 50, 70])


def mixer(name, **options):
    return dict(type=f'aft_mm.{name}', **options)


CONV = mixer('AFTConv', num_heads=4, kernel_size=3)
SIMPLE = mixer('AFTSimple')
# Options without learned positions.
ANY_GRID = [
    *(mixer('AFTConv', num_heads=h, kernel_size=k) for h, k in [(12, 1), (4, 3), (6, 5), (2, 11)]),
    mixer('AFTConv', num_heads=4, kernel_size=5, global_connectivity=False),
    mixer('AFTConv', num_heads=4, kernel_size=(3, 7), query=False),
    SIMPLE,
    mixer('AFTSimple', key_function='relu'),
    mixer('AFTLocalHard', window=4),
    mixer('SoftmaxAttention', num_heads=3),
]


def random_model(**options) -> AFTViT:
    defaults = dict(
        arch=ARCH, img_size=32, patch_size=8, out_type='featmap', position_embedding=False
    )
    model = AFTViT(**{**defaults, **options})
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def with_and_without_mask(**options):
    masked = random_model(with_mask_channel=True, **options)
    plain = random_model(**options)
    plain.load_state_dict(masked.state_dict())
    return masked, plain


def images():
    return [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size in SIZES]


def padded_batch(pictures, **options):
    inner = dict(NORMALIZE, pad_size_divisor=32, **options)
    return MaskedDataPreprocessor(inner)(dict(inputs=pictures))['inputs']


def alone(picture):
    return ImgDataPreprocessor(mean=NORMALIZE['mean'], std=NORMALIZE['std'])(
        dict(inputs=[picture])
    )['inputs']


@pytest.mark.parametrize('with_mask_channel', [False, True])
def test_maps_are_contiguous(with_mask_channel):
    model = random_model(with_mask_channel=with_mask_channel, out_indices=(0, 2))
    maps = model(torch.ones(2, 3 + with_mask_channel, 40, 56))
    assert all(x.is_contiguous() for x in maps)


@pytest.mark.parametrize('token_mixer', ANY_GRID, ids=str)
def test_maps_of_a_padded_batch_equal_those_of_single_images(token_mixer):
    masked, plain = with_and_without_mask(token_mixer=token_mixer, out_indices=(0, 2))
    pictures = images()
    batch = padded_batch(pictures, pad_value=3)
    assert batch.shape == (3, 4, 64, 64)
    leaked = plain(batch[:, :3])
    for outputs, unmasked in zip(masked(batch), leaked, strict=True):
        for i, picture in enumerate(pictures):
            layer = 0 if unmasked is leaked[0] else 1
            expected = plain(alone(picture))[layer][0]
            inside = (slice(None), slice(expected.shape[1]), slice(expected.shape[2]))
            torch.testing.assert_close(outputs[i][inside], expected, atol=1e-5, rtol=1e-5)
            assert not outputs[i][:, expected.shape[1] :].any()
            assert not outputs[i][:, :, expected.shape[2] :].any()
            assert (unmasked[i][inside] - expected).abs().max() > 1e-3


@pytest.mark.parametrize(
    'options',
    [
        dict(token_mixer=CONV, out_type='avg_featmap'),
        dict(token_mixer=SIMPLE, out_type='avg_featmap', with_cls_token=True),
        dict(token_mixer=SIMPLE, out_type='cls_token', with_cls_token=True),
    ],
    ids=str,
)
def test_vectors_of_a_padded_batch_equal_those_of_single_images(options):
    masked, plain = with_and_without_mask(**options)
    pictures = images()
    expected = torch.cat([plain(alone(picture))[0] for picture in pictures])
    batch = padded_batch(pictures)
    torch.testing.assert_close(masked(batch)[0], expected, atol=1e-5, rtol=1e-5)
    assert (plain(batch[:, :3])[0] - expected).abs().max() > 1e-3


def test_padding_may_be_nan_and_gets_no_gradient():
    model = random_model(token_mixer=CONV, with_mask_channel=True)
    batch = padded_batch(images(), pad_value=float('nan'))
    assert batch.isnan().any()
    image = batch[:, :3].requires_grad_()
    model(torch.cat([image, batch[:, 3:]], dim=1))[0].square().sum().backward()
    padding = (batch[:, 3:] == 0).expand_as(image)
    assert not image.grad[padding].any() and image.grad[~padding].abs().min() > 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


def test_checkpointing_masks_the_padding_too():
    plain = random_model(token_mixer=CONV, with_mask_channel=True)
    again = random_model(token_mixer=CONV, with_mask_channel=True, with_cp=True)
    again.load_state_dict(plain.state_dict())
    batch = padded_batch(images())
    for model in (plain, again):
        model(batch)[0].square().sum().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    found = {name: parameter.grad for name, parameter in again.named_parameters()}
    torch.testing.assert_close(found, expected)


def test_a_masked_backbone_compiles_without_graph_breaks():
    model = random_model(arch={**ARCH, 'num_layers': 1}, token_mixer=CONV, with_mask_channel=True)
    batch = padded_batch(images())
    compiled = torch.compile(model, fullgraph=True, backend='eager', dynamic=False)
    torch.testing.assert_close(compiled(batch), model(batch))


def test_necks_take_maps_of_several_layers_or_the_last_one():
    model = random_model(token_mixer=CONV, out_indices=(0, 1, 2))
    image = torch.randn(2, 3, 40, 52)
    maps = model(image)
    assert isinstance(maps, tuple) and [tuple(y.shape) for y in maps] == [(2, 12, 5, 7)] * 3
    pyramid = SimpleFeaturePyramid(12, out_channels=6, in_stride=8, strides=(2, 4, 8, 16))
    levels = pyramid(random_model(token_mixer=CONV)(image))
    assert [tuple(y.shape[2:]) for y in levels] == [(20, 28), (10, 14), (5, 7), (3, 4)]
    refuses('inputs .* must be 1 map, of one layer in out_indices .* got 3', pyramid, maps)


@pytest.mark.parametrize('with_cp', [False, True])
def test_bfloat16_inside_and_float32_outside(with_cp):
    options = dict(token_mixer=CONV, out_indices=(0, 2), with_cp=with_cp)
    exact, model = random_model(**options), random_model(bfloat16=True, **options)
    model.load_state_dict(exact.state_dict())
    seen = {}
    for name in ('patch_embed.projection', 'layers.0.token_mixer.proj', 'layers.2.mlp.0'):
        for which in (exact, model):
            which.get_submodule(name).register_forward_hook(
                lambda module, args, y, key=(which, name): seen.update({key: y.dtype})
            )
    image = torch.randn(2, 3, 32, 40)
    expected, outputs = exact(image), model(image)
    assert {dtype for (which, _), dtype in seen.items() if which is model} == {torch.bfloat16}
    assert {dtype for (which, _), dtype in seen.items() if which is exact} == {torch.float32}
    for one, other in zip(outputs, expected, strict=True):
        assert one.dtype == torch.float32
        assert 0 < (one - other).norm() / other.norm() < 0.05
    sum(y.square().sum() for y in outputs).backward()
    sum(y.square().sum() for y in expected).backward()
    for name, parameter in exact.named_parameters():
        gradient = model.get_parameter(name).grad
        assert gradient.dtype == torch.float32
        if not name.endswith('key.bias'):  # its gradient is rounding
            assert (gradient - parameter.grad).norm() < 0.1 * parameter.grad.norm(), name
    assert model(image)[0].dtype == torch.float32 and not torch.is_autocast_enabled('cpu')


def test_the_weights_can_be_bfloat16():
    model, image = random_model(token_mixer=CONV), torch.randn(2, 3, 32, 40)
    expected = model(image)[0]
    output = model.bfloat16()(image.bfloat16())[0]
    assert output.dtype == torch.bfloat16
    assert (output - expected).norm() < 0.05 * expected.norm()


def test_an_outer_autocast_is_not_disabled():
    model = random_model(token_mixer=CONV, final_norm=False)
    with torch.autocast('cpu', torch.bfloat16):
        assert model(torch.randn(1, 3, 32, 32))[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    'options, channels, message',
    [
        (
            dict(in_channels=1),
            3,
            r'floats \[B, 1, H, W\] for in_channels=1, got .*\[2, 3, 16, 16\]',
        ),
        (dict(), 4, r'floats \[B, 3, H, W\] for in_channels=3, got'),
        (dict(with_mask_channel=True), 3, r'floats \[B, 4, H, W\] for in_channels=3 and the mask'),
    ],
)
def test_another_number_of_channels_is_refused(options, channels, message):
    refuses(message, random_model(token_mixer=CONV, **options), torch.randn(2, channels, 16, 16))


def test_an_image_without_a_seen_pixel_has_a_mean_of_zero():
    model = random_model(with_mask_channel=True, out_type='avg_featmap', out_indices=2)
    image = torch.cat([torch.randn(2, 3, 40, 56), torch.zeros(2, 1, 40, 56)], dim=1)
    image[1, 3] = 1
    (mean,) = model(image)
    assert not mean[0].any() and mean[1].isfinite().all() and mean[1].any()


def test_bfloat16_on_the_meta_device_gives_shapes():
    model = random_model(bfloat16=True, out_indices=2).to('meta')
    (map_,) = model(torch.randn(1, 3, 40, 56, device='meta'))
    assert map_.is_meta and map_.shape[0] == 1
