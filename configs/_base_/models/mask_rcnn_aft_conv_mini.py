# A small Mask R-CNN for one class and for images of 256 x 192 on a CPU; the config sets the class.
_base_ = 'mmdet::_base_/models/mask-rcnn_r50_fpn.py'

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
    rpn_head=dict(
        in_channels=96, feat_channels=96, anchor_generator=dict(scales=[3], strides=[8, 16, 32, 64])
    ),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=96, featmap_strides=[8, 16, 32]),
        bbox_head=dict(in_channels=96, fc_out_channels=256, num_classes=1),
        mask_roi_extractor=dict(out_channels=96, featmap_strides=[8, 16, 32]),
        mask_head=dict(
            in_channels=96,
            conv_out_channels=96,
            num_convs=2,
            num_classes=1,
            # With one class mmdet starts the last convolution at a deviation of 1.4; a cosine
            # (`tempearture`, as mmdet spells it) starts lower.
            predictor_cfg=dict(type='NormedConv2d', tempearture=10),
        ),
    ),
    # Fewer proposals and samples than mmdet's, for a few objects.
    train_cfg=dict(
        rpn=dict(sampler=dict(num=64)),
        rpn_proposal=dict(nms_pre=300, max_per_img=100),
        rcnn=dict(sampler=dict(num=64)),
    ),
)
