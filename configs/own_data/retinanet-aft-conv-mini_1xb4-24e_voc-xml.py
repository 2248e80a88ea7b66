# Images with boxes in PASCAL VOC format: my_boxes/JPEGImages/1.jpg, my_boxes/Annotations/1.xml, and
# the image names without suffix in my_boxes/ImageSets/Main/train.txt and val.txt.
_base_ = [
    '../_base_/models/retinanet_aft_conv_mini.py',
    '../_base_/datasets/bccd_voc.py',
    '../_base_/schedules/det_mini.py',
    '../_base_/det_runtime.py',
]

data_root = '{{$AFT_MM_DATA:data}}/my_boxes/'
metainfo = dict(classes=('cat', 'dog'))  # spelling of the xml files

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
        metainfo=dict(_delete_=True, **metainfo),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(dataset=dict(data_root=data_root, metainfo=dict(_delete_=True, **metainfo)))
test_dataloader = val_dataloader
train_cfg = dict(max_epochs=24)
