# CIFAR-10, <data_root>/cifar-10-batches-bin/*.bin, as sequences of 3,072 sub-pixels. The curve
# shows the test set.
data_root = '{{$AFT_MM_DATA:data}}/cifar10'
image_shape = (32, 32, 3)

# Augmented as in arXiv 2105.14103, §5.1.
train_pipeline = [
    dict(type='mmpretrain.RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='aft_mm.RandomValueShift', max_shift=10),
    dict(type='aft_mm.PackSequence', image_shape=image_shape, tokens='subpixels'),
]
test_pipeline = [dict(type='aft_mm.PackSequence', image_shape=image_shape, tokens='subpixels')]

# The images are in memory already.
train_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    drop_last=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(
        type='aft_mm.CIFAR10Binary', data_root=data_root, split='train', pipeline=train_pipeline
    ),
)

val_dataloader = dict(
    batch_size=16,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='aft_mm.CIFAR10Binary', data_root=data_root, split='test', pipeline=test_pipeline
    ),
)
val_evaluator = dict(type='aft_mm.Likelihood', per='dim')

test_dataloader = val_dataloader
test_evaluator = val_evaluator

custom_hooks = [dict(type='aft_mm.SampleHook', image_shape=image_shape, interval=10)]
