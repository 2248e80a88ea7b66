# UPerNet on four layers of AFT-conv tiny, resized to strides of 4 to 32 pixels.
_base_ = 'mmseg::_base_/models/upernet_vit-b16_ln_mln.py'

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
            seg_pad_val=255,
            size=(512, 512),
        ),
    ),
    backbone=dict(
        _delete_=True,
        type='aft_mm.AFTViT',
        arch='tiny',
        img_size=224,
        patch_size=16,
        token_mixer=dict(type='aft_mm.AFTConv', num_heads=192, kernel_size=11),
        position_embedding=False,
        out_indices=(2, 5, 8, 11),
        out_type='featmap',
        with_mask_channel=True,
        drop_path_rate=0.1,
    ),
    neck=dict(in_channels=[192, 192, 192, 192], out_channels=192),
    decode_head=dict(in_channels=[192, 192, 192, 192], num_classes=150),
    auxiliary_head=dict(in_channels=192, num_classes=150),
)
