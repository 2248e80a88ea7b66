# CIFAR-10 in its binary distribution, <data_root>/cifar-10-batches-bin/*.bin.
data_root = '{{$AFT_MM_DATA:data}}/cifar10'
data_preprocessor = dict(
    num_classes=10, mean=[125.307, 122.961, 113.8575], std=[51.5865, 50.847, 51.255], to_rgb=False
)  # the records are RGB already

train_pipeline = [
    dict(type='RandomCrop', crop_size=32, padding=4),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='PackInputs'),
]
test_pipeline = [dict(type='PackInputs')]

train_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    pin_memory=False,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(
        type='aft_mm.CIFAR10Binary', data_root=data_root, split='train', pipeline=train_pipeline
    ),
)

val_dataloader = dict(
    batch_size=250,
    num_workers=0,
    persistent_workers=False,
    pin_memory=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='aft_mm.CIFAR10Binary', data_root=data_root, split='test', pipeline=test_pipeline
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
