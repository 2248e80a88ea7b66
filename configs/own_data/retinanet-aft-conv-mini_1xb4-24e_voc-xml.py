# Images with boxes in PASCAL VOC format: my_boxes/JPEGImages/1.jpg, my_boxes/Annotations/1.xml, and
# the image names without suffix in my_boxes/ImageSets/Main/train.txt and val.txt.
_base_ = [
    '../_base_/models/retinanet_aft_conv.py',
    '../_base_/datasets/bccd_voc.py',
    '../_base_/schedules/det_mini.py',
    '../_base_/det_runtime.py',
]

data_root = '{{$AFT_MM_DATA:data}}/my_boxes/'
metainfo = dict(classes=('cat', 'dog'))  # spelling of the xml files

model = dict(
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=96, num_layers=5),
        patch_size=8,
        token_mixer=dict(num_heads=96, kernel_size=7),
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.1),
    ),
    neck=dict(in_channels=96, out_channels=96, in_stride=8, strides=(8, 16, 32), num_outs=4),
    bbox_head=dict(
        num_classes=len(metainfo['classes']),
        in_channels=96,
        feat_channels=96,
        stacked_convs=2,
        anchor_generator=dict(strides=[8, 16, 32, 64]),
    ),
)

train_dataloader = dict(
    batch_size=4, dataset=dict(data_root=data_root, metainfo=dict(_delete_=True, **metainfo))
)
val_dataloader = dict(dataset=dict(data_root=data_root, metainfo=dict(_delete_=True, **metainfo)))
test_dataloader = val_dataloader
train_cfg = dict(max_epochs=24)
