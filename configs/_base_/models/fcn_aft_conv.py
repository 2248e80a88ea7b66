# A plain FCN head on the last map of AFT-conv tiny, one place per 16 pixels.
_base_ = 'mmseg::_base_/models/fcn_r50-d8.py'

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
        out_indices=(7, 11),
        out_type='featmap',
        with_mask_channel=True,
        drop_path_rate=0.1,
    ),
    decode_head=dict(in_channels=192, in_index=1, channels=192, num_classes=150),
    auxiliary_head=dict(in_channels=192, in_index=0, channels=192, num_classes=150),
)
