# A recogniser with two small blocks on the folder `sound` of the working directory, written by
# tests/speech_data.py.
_base_ = './tiny_runtime.py'

units = dict(symbols=' abc')
load = dict(type='LoadUtterance', sample_rate=8000, num_mel_bins=20)
normalize = dict(type='NormalizeFeatures', per='speaker')
augment = dict(type='SpecAugment', band=5, span=5)
stack = dict(type='StackFrames', num_frames=2)
pack = dict(type='PackUtterance')

model = dict(
    type='CTCModel',
    encoder=dict(
        type='SequenceEncoder',
        embed_dims=16,
        num_layers=2,
        embedding=dict(type='FrameEmbedding', num_features=40),
        token_mixer=dict(type='AFTConv', num_heads=4, kernel_size=5),
        grid=(64,),
        drop_rate=0.1,
    ),
    head=dict(type='CTCHead', embed_dims=16, num_classes=6),
    beam_size=3,
)

train_dataloader = dict(
    batch_size=4,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=True),
    batch_sampler=dict(type='LengthBatchSampler', num_buckets=3, max_length=150),
    dataset=dict(
        type='SpeechFolder',
        data_root='sound',
        transcripts='train.txt',
        units=units,
        speaker='-(.)',
        pipeline=[load, normalize, augment, stack, pack],
    ),
)
val_dataloader = dict(
    batch_size=3,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='SpeechFolder',
        data_root='sound',
        transcripts='test.txt',
        units=units,
        speaker='-(.)',
        pipeline=[load, normalize, stack, pack],
        test_mode=True,
    ),
)
val_evaluator = [dict(type='ErrorRate', per='character'), dict(type='ErrorRate', per='word')]
test_dataloader = val_dataloader
test_evaluator = val_evaluator

optim_wrapper = dict(optimizer=dict(type='RAdam', lr=1e-3), clip_grad=dict(max_norm=1.0))
param_scheduler = [
    dict(
        type='ReduceOnPlateauLR',
        monitor='character_error_rate',
        rule='less',
        factor=0.5,
        patience=0,
        threshold=100.0,
        threshold_rule='abs',
    )
]

default_hooks = dict(
    finite_loss=dict(type='aft_mm.FiniteLossHook'),
    first_sample=dict(type='aft_mm.SanityCheckHook'),
)
custom_hooks = [dict(type='SkippedDataReportHook'), dict(type='EpochTimeHook')]
