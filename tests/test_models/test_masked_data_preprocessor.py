"""The mask channel of padded batches of images."""

import pytest
import torch
from mmengine.model import BaseDataPreprocessor, BaseModel
from mmengine.registry import DefaultScope
from mmpretrain.registry import MODELS as HOST_MODELS
from mmpretrain.structures import DataSample
from torch import nn

from aft_mm.models import MaskedDataPreprocessor
from aft_mm.registry import MODELS


class Resizing(BaseDataPreprocessor):
    """Halves every image in a batch, like a batch augmentation of a host library."""

    def forward(self, data, training=False):
        inputs = torch.zeros(len(data['inputs']), 3, 12, 16)
        for image, sample, half in zip(data['inputs'], data['data_samples'], inputs, strict=True):
            small = image[:, ::2, ::2]
            half[:, : small.shape[1], : small.shape[2]] = small
            sample.set_metainfo(dict(img_shape=(*small.shape[1:], 3)))
        return dict(inputs=inputs, data_samples=data['data_samples'])


class Video(BaseDataPreprocessor):
    def forward(self, data, training=False):
        return dict(inputs=torch.zeros(2, 5, 3, 8, 8), data_samples=None)


def sample(*img_shape):
    return DataSample(metainfo=dict(img_shape=img_shape))


def inner(**options):
    return dict(type='ImgDataPreprocessor', pad_size_divisor=8, **options)


def ends(mask):
    """Return height and width of the rectangle of ones at the top left."""
    sizes = []
    for image in mask[:, 0]:
        rows, columns = int(image[:, 0].sum()), int(image[0].sum())
        assert image[:rows, :columns].all() and image.sum() == rows * columns
        sizes.append((rows, columns))
    return sizes


def test_the_mask_channel_is_1_inside_each_image():
    images = [torch.randn(3, 5, 9), torch.randn(3, 11, 3)]
    options = dict(mean=[1, 2, 3], std=[4, 5, 6])
    expected = MODELS.build(inner(**options))(dict(inputs=images))['inputs']
    batch = MaskedDataPreprocessor(inner(**options))(dict(inputs=images, extra='unchanged'))
    assert torch.equal(batch['inputs'][:, :3], expected)
    assert batch['inputs'].shape == (2, 4, 16, 16) and batch['extra'] == 'unchanged'
    assert ends(batch['inputs'][:, 3:]) == [(5, 9), (11, 3)]


def test_images_given_as_one_tensor():
    data = dict(inputs=torch.randn(2, 3, 9, 8))
    batch = MaskedDataPreprocessor(inner())(data)['inputs']
    assert batch.shape == (2, 4, 16, 8) and ends(batch[:, 3:]) == [(9, 8), (9, 8)]


def test_img_shape_of_a_sample_overrides_the_input_size():
    images = [torch.ones(3, 14, 20), torch.ones(3, 22, 31)]
    data = dict(inputs=images, data_samples=[sample(14, 20), sample(22, 31)])
    batch = MaskedDataPreprocessor(dict(type=Resizing))(data, training=True)
    assert ends(batch['inputs'][:, 3:]) == [(7, 10), (11, 16)]
    assert torch.equal(batch['inputs'][:, 3], batch['inputs'][:, 0])


def test_without_img_shape_the_input_size_is_used():
    data = dict(inputs=[torch.ones(3, 7, 5)] * 2, data_samples=[DataSample(), sample(6, 4)])
    assert ends(MaskedDataPreprocessor(inner())(data)['inputs'][:, 3:]) == [(7, 5), (6, 4)]


def test_the_inner_preprocessor_gets_training():
    class Recording(BaseDataPreprocessor):
        def forward(self, data, training=False):
            return dict(inputs=torch.stack(data['inputs']), data_samples=None, training=training)

    preprocessor = MaskedDataPreprocessor(dict(type=Recording))
    data = dict(inputs=[torch.randn(3, 4, 4)])
    assert preprocessor(data, True)['training'] and not preprocessor(data)['training']


def test_the_inner_preprocessor_follows_to_the_device():
    images = [torch.randn(3, 5, 9)]
    preprocessor = MaskedDataPreprocessor(inner(mean=[1, 2, 3], std=[4, 5, 6])).to('meta')
    assert preprocessor.device.type == preprocessor(dict(inputs=images))['inputs'].device.type
    model = nn.Sequential(preprocessor)
    preprocessor._device = torch.device('cpu')  # like a host that distributes a model over devices
    model.to_empty(device='cpu')
    assert preprocessor(dict(inputs=images))['inputs'].device.type == 'cpu'


def test_a_batch_of_clips_is_refused():
    with pytest.raises(ValueError, match=r'batch \[B, C, H, W\], got \[2, 5, 3, 8, 8\]'):
        MaskedDataPreprocessor(dict(type=Video))(dict(inputs=torch.zeros(2, 5, 3, 8, 8)))


class Detector(BaseModel):
    def __init__(self, backbone, data_preprocessor):
        super().__init__(data_preprocessor)
        self.backbone = HOST_MODELS.build(backbone)

    def forward(self, inputs, data_samples=None, mode='tensor'):
        return self.backbone(inputs)[0]


@pytest.mark.parametrize('type_', ['ClsDataPreprocessor', 'mmpretrain.ClsDataPreprocessor'])
def test_in_a_model_of_a_host_library(type_):
    backbone = dict(
        type='aft_mm.AFTViT',
        arch=dict(embed_dims=12, num_layers=2),
        patch_size=8,
        position_embedding=False,
        token_mixer=dict(type='aft_mm.AFTConv', num_heads=4, kernel_size=3),
        with_mask_channel=True,
    )
    preprocessor = dict(type=type_, mean=[100] * 3, std=[50] * 3, pad_size_divisor=32)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        model = Detector(
            backbone, dict(type='aft_mm.MaskedDataPreprocessor', preprocessor=preprocessor)
        )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    sizes = [(20, 33), (40, 11)]
    images = [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size in sizes]
    samples = [sample(*size) for size in sizes]
    together = model.test_step(dict(inputs=images, data_samples=samples))
    for image, one, vector in zip(images, samples, together, strict=True):
        (expected,) = model.test_step(dict(inputs=[image], data_samples=[one.clone()]))
        torch.testing.assert_close(vector, expected, atol=1e-5, rtol=1e-5)
    assert (together[0] - together[1]).abs().max() > 1e-3
