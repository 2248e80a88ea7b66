# A Mask R-CNN of two small blocks on twelve images below data/, which a test writes: 3 epochs of 6.
_base_ = '../../configs/detection/mask-rcnn-aft-conv-mini_1xb4-160e-person_coco-mini.py'
custom_imports = dict(imports=['aft_mm.registry', 'recording_hooks'], allow_failed_imports=False)

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
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='RandomResize', scale=(64, 48), ratio_range=(0.8, 1.25), keep_ratio=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs'),
]
metainfo = dict(_delete_=True, classes=('RBC', 'WBC', 'Platelets'))
root = '{{$AFT_MM_DATA:data}}/bccd/'
train_dataloader = dict(
    batch_size=2,
    dataset=dict(
        data_root=root,
        ann_file='annotations_coco/instances_train.json',
        data_prefix=dict(img='JPEGImages/'),
        metainfo=metainfo,
        filter_cfg=dict(min_size=8),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        data_root=root,
        ann_file='annotations_coco/instances_val.json',
        data_prefix=dict(img='JPEGImages/'),
        metainfo=metainfo,
    ),
)
val_evaluator = dict(ann_file=root + 'annotations_coco/instances_val.json')
train_cfg = dict(max_epochs=3, val_interval=1)
default_hooks = dict(
    logger=dict(interval=2), checkpoint=dict(save_best='auto'), stop=dict(type='StopHere')
)
vis_backends = [dict(type='LocalVisBackend')]
visualizer = dict(vis_backends=vis_backends)
