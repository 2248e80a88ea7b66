# One folder of images per class; only a head is trained, on the features of a trained vision
# transformer. `aft_mm new image-folder PATH --start START` sets the backbone and the data.
_base_ = [
    '../_base_/datasets/image_folder.py',
    '../_base_/schedules/mini.py',
    '../_base_/default_runtime.py',
]

data_root = '{{$AFT_MM_DATA:data}}/my_images'
num_classes = 3

model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='aft_mm.AFTViT',
        arch='small',
        img_size=224,
        patch_size=14,
        token_mixer=dict(type='aft_mm.SoftmaxAttention', num_heads=6),
        with_cls_token=True,
        out_indices=(8, 9, 10, 11),
        out_type='cls_token',
        frozen_stages=12,
        init_cfg=dict(type='Pretrained', checkpoint='vit-small-14.pth', prefix='backbone'),
    ),
    neck=dict(type='aft_mm.LayerConcat', in_channels=384),
    head=dict(
        type='LinearClsHead',
        num_classes=num_classes,
        in_channels=4 * 384,
        loss=dict(type='CrossEntropyLoss'),
    ),
)
data_preprocessor = dict(num_classes=num_classes)

pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='ResizeEdge', scale=224, edge='short', backend='pillow', interpolation='bicubic'),
    dict(type='CenterCrop', crop_size=224),
    dict(type='PackInputs'),
]
dataset = dict(data_root=data_root, pipeline=pipeline)
train_dataloader = dict(dataset=dataset)
val_dataloader = dict(dataset=dataset)
test_dataloader = val_dataloader

# The hook sets the head; the optimizer does nothing.
custom_hooks = [dict(type='aft_mm.DiscriminantHeadHook')]
optim_wrapper = dict(optimizer=dict(lr=0.0, weight_decay=0.0))
param_scheduler = None
compile = False
default_hooks = dict(logger=dict(interval=1))
train_cfg = dict(max_epochs=1, val_interval=1)
