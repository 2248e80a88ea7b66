# Images, and a PNG of the same name whose grey levels are class numbers from 0; 255 is ignored:
# my_masks/train/1.jpg, my_masks/train_masks/1.png, my_masks/val, my_masks/val_masks.
_base_ = [
    '../_base_/models/fcn_aft_conv.py',
    '../_base_/datasets/camvid.py',
    '../_base_/schedules/seg_mini.py',
    '../_base_/seg_runtime.py',
]

data_root = '{{$AFT_MM_DATA:data}}/my_masks'
metainfo = dict(classes=('background', 'cat', 'dog'))
image_suffix = '.jpg'
ignored = 255

num_classes = len(metainfo['classes'])
norm_cfg = dict(type='BN', requires_grad=True)
head = dict(
    in_channels=96, channels=96, num_classes=num_classes, ignore_index=ignored, norm_cfg=norm_cfg
)
model = dict(
    data_preprocessor=dict(preprocessor=dict(size=(256, 256), seg_pad_val=ignored)),
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=96, num_layers=5),
        patch_size=8,
        token_mixer=dict(num_heads=96, kernel_size=7),
        out_indices=(2, 4),
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.1),
    ),
    decode_head=head,
    auxiliary_head=head,
)

scale = (480, 360)  # images are scaled to fit, in training, test and prediction
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations'),
    dict(type='RandomResize', scale=scale, ratio_range=(0.75, 1.5), keep_ratio=True),
    dict(type='RandomCrop', crop_size=(256, 256), cat_max_ratio=0.75, ignore_index=ignored),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackSegInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=scale, keep_ratio=True),
    dict(type='LoadAnnotations'),  # in their size, to which predictions are scaled
    dict(type='PackSegInputs'),
]
dataset = dict(
    data_root=data_root,
    img_suffix=image_suffix,
    seg_map_suffix='.png',
    ignore_index=ignored,
    metainfo=dict(_delete_=True, **metainfo),
)
train_dataloader = dict(
    batch_size=4,
    dataset=dict(
        data_prefix=dict(img_path='train', seg_map_path='train_masks'),
        pipeline=train_pipeline,
        **dataset,
    ),
)
val_dataloader = dict(
    dataset=dict(
        data_prefix=dict(img_path='val', seg_map_path='val_masks'),
        pipeline=test_pipeline,
        **dataset,
    )
)
test_dataloader = val_dataloader
val_evaluator = dict(ignore_index=ignored)
test_evaluator = val_evaluator

train_cfg = dict(type='IterBasedTrainLoop', max_iters=1200, val_interval=300)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=False, begin=50, end=1200),
]
