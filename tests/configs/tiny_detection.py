# A RetinaNet of two small blocks.
_base_ = ['../../configs/_base_/models/retinanet_aft_conv.py', 'tiny_boxes.py']

model = dict(
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=16, num_layers=2),
        patch_size=8,
        token_mixer=dict(num_heads=4, kernel_size=3),
        drop_path_rate=0.2,
    ),
    neck=dict(in_channels=16, out_channels=16, in_stride=8, num_outs=4),
    bbox_head=dict(
        num_classes=3,
        in_channels=16,
        feat_channels=16,
        stacked_convs=1,
        anchor_generator=dict(strides=[8, 16, 32, 64]),
    ),
    test_cfg=dict(score_thr=0.0, max_per_img=5),
)
