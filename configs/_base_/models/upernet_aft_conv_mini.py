# UPerNet on four of five layers of AFT-conv, 96 channels and patches of 8 x 8 pixels.
_base_ = 'mmseg::_base_/models/upernet_vit-b16_ln_mln.py'

norm_cfg = dict(type='BN', requires_grad=True)
model = dict(
    pretrained=None,
    data_preprocessor=dict(
        _delete_=True,
        type='aft_mm.MaskedDataPreprocessor',
        preprocessor=dict(
            type='SegDataPreProcessor',
            mean=[123.675, 116.28, 103.53],
            std=[58.395, 57.12, 57.375],
            bgr_to_rgb=True,
            pad_val=0,
            seg_pad_val=11,
            size=(256, 256),
        ),
    ),
    backbone=dict(
        _delete_=True,
        type='aft_mm.AFTViT',
        arch=dict(embed_dims=96, num_layers=5),
        img_size=224,
        patch_size=8,
        token_mixer=dict(type='aft_mm.AFTConv', num_heads=96, kernel_size=7),
        position_embedding=False,
        out_indices=(1, 2, 3, 4),
        out_type='featmap',
        with_mask_channel=True,
        drop_path_rate=0.1,
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.1),
    ),
    # The map has one place per 8 pixels: strides of 4 to 32.
    neck=dict(in_channels=[96, 96, 96, 96], out_channels=96, scales=[2, 1, 0.5, 0.25]),
    decode_head=dict(
        in_channels=[96, 96, 96, 96],
        channels=96,
        num_classes=11,
        ignore_index=11,
        norm_cfg=norm_cfg,
    ),
    auxiliary_head=dict(
        in_channels=96, channels=96, num_classes=11, ignore_index=11, norm_cfg=norm_cfg
    ),
)
