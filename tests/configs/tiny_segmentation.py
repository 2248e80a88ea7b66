# UPerNet over two small blocks on six frames below data/, which a test writes: 18 iterations.
_base_ = '../../configs/segmentation/upernet-aft-conv-mini_1xb4-1200i_camvid.py'
custom_imports = dict(imports=['aft_mm.registry', 'recording_hooks'], allow_failed_imports=False)

model = dict(
    data_preprocessor=dict(preprocessor=dict(size=(32, 32))),
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=16, num_layers=2),
        token_mixer=dict(num_heads=4, kernel_size=3),
        out_indices=(0, 1),
        drop_path_rate=0.2,
    ),
    neck=dict(in_channels=[16, 16], out_channels=16, scales=[1, 0.5]),
    decode_head=dict(in_channels=[16, 16], in_index=[0, 1], channels=16),
    auxiliary_head=dict(in_channels=16, in_index=1, channels=16),
)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations'),
    dict(type='RandomResize', scale=(48, 40), ratio_range=(0.75, 1.5), keep_ratio=True),
    dict(type='RandomCrop', crop_size=(32, 32), ignore_index=11),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackSegInputs'),
]
train_dataloader = dict(batch_size=2, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(num_workers=0, persistent_workers=False)
train_cfg = dict(max_iters=18, val_interval=6)
param_scheduler = [dict(type='CosineAnnealingLR', by_epoch=False, T_max=18)]
default_hooks = dict(
    logger=dict(type='LoggerHook', interval=2),
    checkpoint=dict(type='aft_mm.SafeCheckpointHook', by_epoch=False, interval=6, save_best='mIoU'),
    stop=dict(type='StopHere'),
)
vis_backends = [dict(type='LocalVisBackend')]
visualizer = dict(vis_backends=vis_backends)
