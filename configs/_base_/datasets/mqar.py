# Generated associative recall: 4 of 16 keys with their values, then the same keys again.
train_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    drop_last=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(
        type='aft_mm.AssociativeRecall',
        split='train',
        num_pairs=4,
        num_keys=16,
        num_samples=32000,
    ),
)

val_dataloader = dict(
    batch_size=64,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='aft_mm.AssociativeRecall', split='val', num_pairs=4, num_keys=16, num_samples=1024
    ),
)
val_evaluator = [dict(type='aft_mm.Likelihood', per='token'), dict(type='aft_mm.TokenAccuracy')]

test_dataloader = dict(
    batch_size=64,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='aft_mm.AssociativeRecall', split='test', num_pairs=4, num_keys=16, num_samples=1024
    ),
)
test_evaluator = val_evaluator
