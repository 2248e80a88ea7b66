# 100 hours of LibriSpeech, spelled: <data_root>/{train-clean-100,dev-clean,test-clean} with FLAC
# files and a file `text` each. The longest utterances have about 35 seconds.
data_root = '{{$AFT_MM_DATA:data}}/librispeech'
units = dict(symbols=" 'ABCDEFGHIJKLMNOPQRSTUVWXYZ")

pipeline = [
    dict(
        type='aft_mm.LoadUtterance',
        sample_rate=16000,
        num_mel_bins=40,
        cache_dir=data_root + '/fbank40',
    ),
    dict(type='aft_mm.NormalizeFeatures', per='utterance'),
    dict(type='aft_mm.PackUtterance'),
]

# A batch has at most 24,000 frames with padding.
train_dataloader = dict(
    num_workers=4,
    persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=True),
    batch_sampler=dict(type='aft_mm.LengthBatchSampler', num_buckets=50, max_length=24000),
    dataset=dict(
        type='aft_mm.SpeechFolder',
        data_root=data_root + '/train-clean-100',
        units=units,
        max_frames=3600,
        pipeline=pipeline,
    ),
)

val_dataloader = dict(
    batch_size=6,
    num_workers=4,
    persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='aft_mm.SpeechFolder',
        data_root=data_root + '/dev-clean',
        units=units,
        max_frames=3600,
        pipeline=pipeline,
        test_mode=True,
    ),
)
val_evaluator = [
    dict(type='aft_mm.ErrorRate', per='character'),
    dict(type='aft_mm.ErrorRate', per='word'),
]

test_dataloader = dict(
    batch_size=6,
    num_workers=4,
    persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='aft_mm.SpeechFolder',
        data_root=data_root + '/test-clean',
        units=units,
        max_frames=3600,
        pipeline=pipeline,
        test_mode=True,
    ),
)
test_evaluator = val_evaluator

custom_hooks = [dict(type='aft_mm.SkippedDataReportHook'), dict(type='aft_mm.EpochTimeHook')]
