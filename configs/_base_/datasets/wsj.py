# Wall Street Journal in Kaldi's layout, <data_root>/{train_si284,test_dev93,test_eval92}/
# {feats.scp,text,utt2spk} with 40 filter banks, and CMUdict as <data_root>/cmudict-0.7b; utterances
# of 2,400 frames at most. Unknown words are <unk>.
data_root = '{{$AFT_MM_DATA:data}}/wsj'
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
    lexicon=data_root + '/cmudict-0.7b',
    case='upper',
)

pipeline = [
    dict(type='aft_mm.LoadUtterance', sample_rate=16000, num_mel_bins=40),
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
        type='aft_mm.KaldiFeatures',
        data_root=data_root + '/train_si284',
        units=units,
        max_frames=2400,
        pipeline=pipeline,
    ),
)

val_dataloader = dict(
    batch_size=16,
    num_workers=4,
    persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='aft_mm.KaldiFeatures',
        data_root=data_root + '/test_dev93',
        units=units,
        max_frames=2400,
        pipeline=pipeline,
        test_mode=True,
    ),
)
val_evaluator = dict(type='aft_mm.ErrorRate', per='phoneme')

test_dataloader = dict(
    batch_size=16,
    num_workers=4,
    persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='aft_mm.KaldiFeatures',
        data_root=data_root + '/test_eval92',
        units=units,
        max_frames=2400,
        pipeline=pipeline,
        test_mode=True,
    ),
)
test_evaluator = val_evaluator

custom_hooks = [dict(type='aft_mm.SkippedDataReportHook'), dict(type='aft_mm.EpochTimeHook')]
