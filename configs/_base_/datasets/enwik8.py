# The bytes of <data_root>/enwik8 or enwik8.gz, 90 % for training, 5 % each for validation and test.
# For another file set `train_dataloader.dataset.data_file`, also of val_ and test_dataloader.
data_file = '{{$AFT_MM_DATA:data}}/enwik8/enwik8'

# An epoch has as many random crops as contexts fit.
train_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    drop_last=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(type='aft_mm.TextFile', data_file=data_file, split='train', context_length=1024),
)

# Blocks in order: every byte is predicted once.
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
