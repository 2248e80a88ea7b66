# ImageNet-1K, 384 px, augmented as DeiT does (arXiv 2012.12877, table 9).
data_root = '{{$AFT_MM_DATA:data}}/imagenet'
data_preprocessor = dict(
    num_classes=1000, mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], to_rgb=True
)

# Images are BGR until the data preprocessor.
bgr_mean = data_preprocessor['mean'][::-1]
bgr_std = data_preprocessor['std'][::-1]

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='RandomResizedCrop', scale=384, backend='pillow', interpolation='bicubic'),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    # rand-m9-mstd0.5-inc1
    dict(
        type='RandAugment',
        policies='timm_increasing',
        num_policies=2,
        total_level=10,
        magnitude_level=9,
        magnitude_std=0.5,
        hparams=dict(pad_val=[round(x) for x in bgr_mean], interpolation='bicubic'),
    ),
    # Before the normalisation: DeiT's N(0, 1) after it.
    dict(
        type='RandomErasing',
        erase_prob=0.25,
        mode='rand',
        min_area_ratio=0.02,
        max_area_ratio=1 / 3,
        fill_color=bgr_mean,
        fill_std=bgr_std,
    ),
    dict(type='PackInputs'),
]

# The crop covers 0.875 of the short edge.
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='ResizeEdge', scale=438, edge='short', backend='pillow', interpolation='bicubic'),
    dict(type='CenterCrop', crop_size=384),
    dict(type='PackInputs'),
]

# Repeated augmentation: a third of the images, each three times.
train_dataloader = dict(
    num_workers=8,
    persistent_workers=False,
    pin_memory=True,
    drop_last=True,
    sampler=dict(type='RepeatAugSampler', shuffle=True, num_repeats=3),
    dataset=dict(type='ImageNet', data_root=data_root, split='train', pipeline=train_pipeline),
)

val_dataloader = dict(
    batch_size=32,
    num_workers=8,
    persistent_workers=True,
    pin_memory=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(type='ImageNet', data_root=data_root, split='val', pipeline=test_pipeline),
)
val_evaluator = dict(type='Accuracy', topk=(1, 5))

# The labels of the test split are not public.
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
