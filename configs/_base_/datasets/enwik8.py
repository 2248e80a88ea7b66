# The bytes of <data_root>/enwik8 or enwik8.gz; the first 90 % for training, 5 % each for validation
# and test. Any other file works likewise: `--cfg-options train_dataloader.dataset.data_file=...`,
# and the same for val_dataloader and test_dataloader.
data_file = '{{$AFT_MM_DATA:data}}/enwik8/enwik8'

# An epoch is as many random crops as contexts fit into the training part.
train_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    drop_last=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(type='aft_mm.TextFile', data_file=data_file, split='train', context_length=1024),
)

# The whole split in order, in blocks: every byte is predicted once, the first ones of a block from
# little context.
val_dataloader = dict(
    batch_size=16,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='aft_mm.TextFile',
        data_file=data_file,
        split='val',
        context_length=1024,
        evaluation='blocks',
    ),
)
val_evaluator = dict(type='aft_mm.Likelihood', per='char')

test_dataloader = dict(
    batch_size=16,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='aft_mm.TextFile',
        data_file=data_file,
        split='test',
        context_length=1024,
        evaluation='blocks',
    ),
)
test_evaluator = val_evaluator
