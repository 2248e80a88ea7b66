# Class folders, data_root/train/cat/1.jpg and data_root/val/cat/2.png;
# `aft_mm split` makes the two parts of one. The size occurs three times
# below.
data_preprocessor = dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], to_rgb=True)
extensions = (
    *('.jpg', '.jpeg', '.png', '.webp', '.tif', '.tiff', '.bmp', '.ppm', '.pgm', '.gif', '.jfif'),
    *('.jpe', '.apng', '.mpo', '.dib', '.pbm', '.pnm'),
)

train_pipeline = [
    dict(
        type='LoadImageFromFile'
    ),  # greyscale, 16 bits and CMYK come out as three channels of 8 bits
    dict(
        type='RandomResizedCrop',
        scale=64,
        crop_ratio_range=(0.35, 1.0),
        backend='pillow',
        interpolation='bicubic',
    ),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='PackInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='ResizeEdge', scale=73, edge='short', backend='pillow', interpolation='bicubic'),
    dict(type='CenterCrop', crop_size=64),
    dict(type='PackInputs'),
]

train_dataloader = dict(
    batch_size=50,
    num_workers=1,
    persistent_workers=False,
    pin_memory=False,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(
        type='CustomDataset', data_prefix='train', extensions=extensions, pipeline=train_pipeline
    ),
)
val_dataloader = dict(
    batch_size=100,
    num_workers=1,
    persistent_workers=True,
    pin_memory=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='CustomDataset', data_prefix='val', extensions=extensions, pipeline=test_pipeline
    ),
)
val_evaluator = dict(type='Accuracy', topk=(1,))

test_dataloader = val_dataloader
test_evaluator = val_evaluator
