# Images with boxes as COCO json: my_boxes/images/1.jpg, my_boxes/train.json, my_boxes/val.json.
_base_ = [
    '../_base_/models/retinanet_aft_conv_mini.py',
    '../_base_/datasets/bccd.py',
    '../_base_/schedules/det_mini.py',
    '../_base_/det_runtime.py',
]

data_root = '{{$AFT_MM_DATA:data}}/my_boxes/'
metainfo = dict(classes=('cat', 'dog'))  # spelling and order of the json's categories

model = dict(bbox_head=dict(num_classes=len(metainfo['classes'])))

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='RandomResize', scale=(384, 288), ratio_range=(0.8, 1.25), keep_ratio=True),
    dict(type='RandomFlip', prob=0.5),  # horizontal
    dict(type='PackDetInputs'),
]

train_dataloader = dict(
    batch_size=4,
    dataset=dict(
        data_root=data_root,
        ann_file='train.json',
        data_prefix=dict(img='images/'),
        metainfo=dict(_delete_=True, **metainfo),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    dataset=dict(
        data_root=data_root,
        ann_file='val.json',
        data_prefix=dict(img='images/'),
        metainfo=dict(_delete_=True, **metainfo),
    )
)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'val.json')
test_evaluator = val_evaluator
train_cfg = dict(max_epochs=24)
