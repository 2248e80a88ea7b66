# Generated images of two paths of three dashes: are the two dots on one path?
data_preprocessor = dict(num_classes=2, mean=[20], std=[50], to_rgb=False)

train_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    pin_memory=False,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(
        type='aft_mm.Pathfinder',
        split='train',
        num_samples=32000,
        num_steps=3,
        pipeline=[dict(type='PackInputs')],
    ),
)

val_dataloader = dict(
    batch_size=250,
    num_workers=0,
    persistent_workers=False,
    pin_memory=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='aft_mm.Pathfinder',
        split='val',
        num_samples=2000,
        num_steps=3,
        pipeline=[dict(type='PackInputs')],
    ),
)
val_evaluator = dict(type='Accuracy', topk=(1,))

test_dataloader = dict(
    batch_size=250,
    num_workers=0,
    persistent_workers=False,
    pin_memory=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='aft_mm.Pathfinder',
        split='test',
        num_samples=4000,
        num_steps=3,
        pipeline=[dict(type='PackInputs')],
    ),
)
test_evaluator = val_evaluator
