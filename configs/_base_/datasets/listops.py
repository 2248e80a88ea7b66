# ListOps cut to 6 to 32 tokens, 3 levels and 4 elements per list; the usual ones have 500 to 2,000 tokens.
train_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    drop_last=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(
        type='aft_mm.ListOps',
        split='train',
        max_length=32,
        min_length=6,
        max_depth=3,
        max_args=4,
        num_samples=32000,
    ),
)

val_dataloader = dict(
    batch_size=64,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='aft_mm.ListOps',
        split='val',
        max_length=32,
        min_length=6,
        max_depth=3,
        max_args=4,
        num_samples=2048,
    ),
)
val_evaluator = [dict(type='aft_mm.Likelihood', per='token'), dict(type='aft_mm.TokenAccuracy')]

test_dataloader = dict(
    batch_size=64,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='aft_mm.ListOps',
        split='test',
        max_length=32,
        min_length=6,
        max_depth=3,
        max_args=4,
        num_samples=2048,
    ),
)
test_evaluator = val_evaluator
