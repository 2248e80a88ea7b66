# CamVid with boxes and masks: connected regions of its labels, frames of 480 x 360 at 256 x 192.
# The config sets the classes.
data_root = '{{$AFT_MM_DATA:data}}/camvid'

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='RandomResize', scale=(256, 192), ratio_range=(0.8, 1.25), keep_ratio=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(256, 192), keep_ratio=True),
    # After resizing: the ground truth stays in the pixels of the file.
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    # Without an annotation file the metric takes the ground truth from the samples.
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor', 'instances'),
    ),
]

train_dataloader = dict(
    num_workers=1,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(
        type='aft_mm.CamVidObjects', data_root=data_root, split='train', pipeline=train_pipeline
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=1,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='aft_mm.CamVidObjects',
        data_root=data_root,
        split='val',
        test_mode=True,
        pipeline=test_pipeline,
    ),
)
test_dataloader = dict(
    batch_size=1,
    num_workers=1,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='aft_mm.CamVidObjects',
        data_root=data_root,
        split='test',
        test_mode=True,
        pipeline=test_pipeline,
    ),
)
val_evaluator = dict(type='CocoMetric', metric=['bbox', 'segm'])
test_evaluator = val_evaluator
