# The 1,797 handwritten digits of 8x8 pixels that scikit-learn ships; nothing is downloaded.
data_preprocessor = dict(num_classes=10, mean=[77.9], std=[95.9], to_rgb=False)

train_pipeline = [
    dict(type='RandomCrop', crop_size=8, padding=1),  # shifts by at most one pixel
    dict(type='PackInputs'),
]
# Pictures of other sizes, in `aft_mm predict` and `aft_mm demo`; a digit of the set stays as it is.
test_pipeline = [
    dict(type='Resize', scale=8, interpolation='area'),
    dict(type='PackInputs'),
]

train_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    pin_memory=False,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(type='aft_mm.Digits', split='train', pipeline=train_pipeline),
)

val_dataloader = dict(
    batch_size=360,
    num_workers=0,
    persistent_workers=False,
    pin_memory=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(type='aft_mm.Digits', split='test', pipeline=test_pipeline),
)
val_evaluator = dict(type='Accuracy', topk=(1,))

test_dataloader = val_dataloader
test_evaluator = val_evaluator
