# A detector of two small blocks on twelve images below data/, which a test writes: 3 epochs of 6.
_base_ = '../../configs/detection/retinanet-aft-conv-mini_1xb4-24e_bccd.py'
custom_imports = dict(imports=['aft_mm.registry', 'recording_hooks'], allow_failed_imports=False)

model = dict(
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=16, num_layers=2),
        token_mixer=dict(num_heads=4, kernel_size=3),
        drop_path_rate=0.2,
    ),
    neck=dict(in_channels=16, out_channels=16),
    bbox_head=dict(in_channels=16, feat_channels=16, stacked_convs=1),
    test_cfg=dict(score_thr=0.0, max_per_img=5),
)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='RandomResize', scale=(64, 48), ratio_range=(0.8, 1.25), keep_ratio=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs'),
]
train_dataloader = dict(batch_size=2, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(num_workers=0, persistent_workers=False)
train_cfg = dict(max_epochs=3, val_interval=1)
default_hooks = dict(
    logger=dict(interval=2), checkpoint=dict(save_best='auto'), stop=dict(type='StopHere')
)
vis_backends = [dict(type='LocalVisBackend')]
visualizer = dict(vis_backends=vis_backends)
