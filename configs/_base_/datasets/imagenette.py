# Imagenette, ten classes of ImageNet in its folder layout, at 64 px: minutes on a CPU.
data_root = '{{$AFT_MM_DATA:data}}/imagenette'
data_preprocessor = dict(
    num_classes=10, mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], to_rgb=True
)

# In the order of the folder names n01440764 ... n03888257.
metainfo = dict(
    classes=(
        'tench',
        'English springer',
        'cassette player',
        'chain saw',
        'church',
        'French horn',
        'garbage truck',
        'gas pump',
        'golf ball',
        'parachute',
    )
)

train_pipeline = [
    dict(type='LoadImageFromFile'),
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
    num_workers=1,
    persistent_workers=False,
    pin_memory=False,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(
        type='ImageNet',
        data_root=data_root,
        split='train',
        metainfo=metainfo,
        pipeline=train_pipeline,
    ),
)

val_dataloader = dict(
    batch_size=100,
    num_workers=1,
    persistent_workers=True,
    pin_memory=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='ImageNet', data_root=data_root, split='val', metainfo=metainfo, pipeline=test_pipeline
    ),
)
val_evaluator = dict(type='Accuracy', topk=(1,))

test_dataloader = val_dataloader
test_evaluator = val_evaluator

# `--tta`: the mean scores of an image and its mirror image.
tta_model = dict(type='AverageClsScoreTTA')
tta_pipeline = test_pipeline[:-1] + [
    dict(
        type='TestTimeAug',
        transforms=[
            [dict(type='RandomFlip', prob=0.0), dict(type='RandomFlip', prob=1.0)],
            [dict(type='PackInputs')],
        ],
    )
]
