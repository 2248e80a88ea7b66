# A small RetinaNet for images of about 384 x 288 on a CPU; the config sets the number of classes.
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
        arch=dict(embed_dims=96, num_layers=5),
        img_size=224,
        patch_size=8,
        token_mixer=dict(type='aft_mm.AFTConv', num_heads=96, kernel_size=7),
        position_embedding=False,
        out_type='featmap',
        with_mask_channel=True,
        drop_path_rate=0.1,
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.1),
    ),
    neck=dict(
        _delete_=True,
        type='aft_mm.SimpleFeaturePyramid',
        in_channels=96,
        out_channels=96,
        in_stride=8,
        strides=(8, 16, 32),
        num_outs=4,
    ),
    bbox_head=dict(
        in_channels=96,
        feat_channels=96,
        stacked_convs=2,
        anchor_generator=dict(strides=[8, 16, 32, 64]),
    ),
)
