# RetinaNet on AFT-conv tiny; see mask_rcnn_aft_conv.py.
_base_ = 'mmdet::_base_/models/retinanet_r50_fpn.py'

model = dict(
    data_preprocessor=dict(
        _delete_=True,
        type='aft_mm.MaskedDataPreprocessor',
        preprocessor={{_base_.model.data_preprocessor}},
    ),
    backbone=dict(
        _delete_=True,
        type='aft_mm.AFTViT',
        arch='tiny',
        img_size=224,
        patch_size=16,
        token_mixer=dict(type='aft_mm.AFTConv', num_heads=192, kernel_size=11),
        position_embedding=False,
        out_type='featmap',
        with_mask_channel=True,
        drop_path_rate=0.1,
    ),
    neck=dict(
        _delete_=True,
        type='aft_mm.SimpleFeaturePyramid',
        in_channels=192,
        out_channels=256,
        strides=(8, 16, 32),
        num_outs=5,
    ),
)
