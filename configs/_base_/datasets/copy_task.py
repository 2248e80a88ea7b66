# Generated sequences; an epoch of training is 1,000 batches of 64.
train_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    drop_last=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(type='aft_mm.CopyTask', split='train', num_samples=64000),
)

val_dataloader = dict(
    batch_size=64,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(type='aft_mm.CopyTask', split='val', num_samples=1024),
)
val_evaluator = [dict(type='aft_mm.Likelihood', per='token'), dict(type='aft_mm.TokenAccuracy')]

test_dataloader = dict(
    batch_size=64,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(type='aft_mm.CopyTask', split='test', num_samples=1024),
)
test_evaluator = val_evaluator
