# BCCD: blood cells and platelets under a microscope, 640 x 480, boxes in COCO's format.
data_root = '{{$AFT_MM_DATA:data}}/bccd/'
# In the order of the json files, as mmdet numbers them.
metainfo = dict(
    classes=('RBC', 'WBC', 'Platelets'), palette=[(220, 20, 60), (0, 92, 230), (255, 196, 0)]
)

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='RandomResize', scale=(384, 288), ratio_range=(0.8, 1.25), keep_ratio=True),
    dict(
        type='RandomFlip', prob=[0.25, 0.25, 0.25], direction=['horizontal', 'vertical', 'diagonal']
    ),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(384, 288), keep_ratio=True),
    # After resizing: the ground truth stays in the pixels of the file.
    dict(type='LoadAnnotations', with_bbox=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'),
    ),
]

train_dataloader = dict(
    num_workers=1,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(
        type='CocoDataset',
        data_root=data_root,
        ann_file='annotations_coco/instances_train.json',
        data_prefix=dict(img='JPEGImages/'),
        metainfo=metainfo,
        filter_cfg=dict(filter_empty_gt=True),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=1,
    persistent_workers=True,
    drop_last=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='CocoDataset',
        data_root=data_root,
        ann_file='annotations_coco/instances_val.json',
        data_prefix=dict(img='JPEGImages/'),
        metainfo=metainfo,
        test_mode=True,
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(
    type='CocoMetric', ann_file=data_root + 'annotations_coco/instances_val.json', metric='bbox'
)
test_evaluator = val_evaluator
