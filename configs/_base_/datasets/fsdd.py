# Spoken digits, <data_root>/recordings/*.wav of 8 kHz, one unit per word, three frames of 10 ms per
# position. The curve shows the official test part, of the same speakers.
data_root = '{{$AFT_MM_DATA:data}}/fsdd'
words = ['zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine']
units = dict(symbols=words, level='word')

# Computing the filter banks in every epoch takes longer than the training.
load = dict(
    type='aft_mm.LoadUtterance', sample_rate=8000, num_mel_bins=40, cache_dir='work_dirs/features'
)
# A word is too short for the mean of each bin.
normalize = dict(type='aft_mm.NormalizeFeatures', joint_bins=True)
mask = dict(type='aft_mm.SpecAugment', num_bands=1, band=4, num_spans=1, span=10)
stack = dict(type='aft_mm.StackFrames', num_frames=3)
pack = dict(type='aft_mm.PackUtterance')
train_pipeline = [load, normalize, mask, stack, pack]
test_pipeline = [load, normalize, stack, pack]

train_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=True),
    batch_sampler=dict(type='aft_mm.LengthBatchSampler', num_buckets=4),
    dataset=dict(
        type='aft_mm.FSDD', data_root=data_root, split='train', units=units, pipeline=train_pipeline
    ),
)

val_dataloader = dict(
    batch_size=25,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='aft_mm.FSDD',
        data_root=data_root,
        split='test',
        units=units,
        pipeline=test_pipeline,
        test_mode=True,
    ),
)
# Errors of free spelling, and of the most likely of the ten words.
val_evaluator = [
    dict(type='aft_mm.ErrorRate', per='word'),
    dict(type='aft_mm.ErrorRate', per='word', lexicon=True),
]

test_dataloader = val_dataloader
test_evaluator = val_evaluator

custom_hooks = [dict(type='aft_mm.SkippedDataReportHook'), dict(type='aft_mm.EpochTimeHook')]
