# AN4 as cepstra of Sphinx, 13 per frame of 10 ms, stacked by three; transcripts as phonemes. The
# curve shows the test part, of other speakers.
data_root = '{{$AFT_MM_DATA:data}}/an4_mfcc'
units = dict(
    symbols=[
        'AA',
        'AE',
        'AH',
        'AO',
        'AW',
        'AY',
        'B',
        'CH',
        'D',
        'DH',
        'EH',
        'ER',
        'EY',
        'F',
        'G',
        'HH',
        'IH',
        'IY',
        'JH',
        'K',
        'L',
        'M',
        'N',
        'NG',
        'OW',
        'OY',
        'P',
        'R',
        'S',
        'SH',
        'T',
        'TH',
        'UH',
        'UW',
        'V',
        'W',
        'Y',
        'Z',
        'ZH',
    ],
    lexicon=data_root + '/etc/an4.dic',
    case='upper',
)
speaker = '-(.+)-'  # of an146-fclc-b

train_pipeline = [
    dict(type='aft_mm.LoadUtterance'),
    dict(type='aft_mm.NormalizeFeatures', per='speaker'),
    dict(type='aft_mm.SpecAugment', num_bands=1, band=3, num_spans=2, span=20),
    dict(type='aft_mm.StackFrames', num_frames=3),
    dict(type='aft_mm.PackUtterance'),
]
test_pipeline = [
    dict(type='aft_mm.LoadUtterance'),
    dict(type='aft_mm.NormalizeFeatures', per='speaker'),
    dict(type='aft_mm.StackFrames', num_frames=3),
    dict(type='aft_mm.PackUtterance'),
]

train_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=True),
    batch_sampler=dict(type='aft_mm.LengthBatchSampler', num_buckets=6),
    dataset=dict(
        type='aft_mm.SphinxFeatures',
        data_root=data_root,
        fileids='etc/an4_train.fileids',
        transcription='etc/an4_train.transcription',
        units=units,
        speaker=speaker,
        pipeline=train_pipeline,
    ),
)

val_dataloader = dict(
    batch_size=26,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='aft_mm.SphinxFeatures',
        data_root=data_root,
        fileids='etc/an4_test.fileids',
        transcription='etc/an4_test.transcription',
        units=units,
        speaker=speaker,
        pipeline=test_pipeline,
        test_mode=True,
    ),
)
val_evaluator = dict(type='aft_mm.ErrorRate', per='phoneme')

test_dataloader = val_dataloader
test_evaluator = val_evaluator

custom_hooks = [dict(type='aft_mm.SkippedDataReportHook'), dict(type='aft_mm.EpochTimeHook')]
