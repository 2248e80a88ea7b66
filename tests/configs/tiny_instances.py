# A Mask R-CNN of two small blocks.
_base_ = ['../../configs/_base_/models/mask_rcnn_aft_conv_mini.py', 'tiny_boxes.py']

model = dict(
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=16, num_layers=2),
        token_mixer=dict(num_heads=4, kernel_size=3),
        drop_path_rate=0.2,
    ),
    neck=dict(in_channels=16, out_channels=16),
    rpn_head=dict(in_channels=16, feat_channels=16),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=16),
        bbox_head=dict(in_channels=16, fc_out_channels=16, num_classes=3),
        mask_roi_extractor=dict(out_channels=16),
        mask_head=dict(in_channels=16, conv_out_channels=16, num_convs=1, num_classes=3),
    ),
    test_cfg=dict(rcnn=dict(score_thr=0.0, max_per_img=5)),
)
val_evaluator = dict(metric=['bbox', 'segm'])
