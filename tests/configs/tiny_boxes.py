# Three epochs of six iterations on twelve images below data/, which a test writes: a base without a model.
_base_ = [
    '../../configs/_base_/datasets/bccd.py',
    '../../configs/_base_/schedules/det_mini.py',
    '../../configs/_base_/det_runtime.py',
]
custom_imports = dict(imports=['aft_mm.registry', 'recording_hooks'], allow_failed_imports=False)

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
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
