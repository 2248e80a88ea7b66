# "Yes" and "no", eight words per recording, spelled: 0 to 3 errors in 32 words after a minute.
#     aft_mm train aft-conv-h8-k15-mini_1xb4-100e_yesno
_base_ = [
    '../_base_/models/ctc_encoder.py',
    '../_base_/datasets/fsdd.py',
    '../_base_/schedules/ctc_mini.py',
    '../_base_/ar_runtime.py',
]

units = dict(_delete_=True, symbols=' ENOSY')
folder = dict(
    _delete_=True,
    type='aft_mm.SpeechFolder',
    data_root='{{$AFT_MM_DATA:data}}/yesno',
    units=dict(symbols=units['symbols']),
)

# The recordings are long enough for the mean of each bin.
normalize = dict(type='aft_mm.NormalizeFeatures', joint_bins=False)
train_pipeline = [
    {{_base_.load}},
    normalize,
    {{_base_.mask}},
    {{_base_.stack}},
    {{_base_.pack}},
]
test_pipeline = [{{_base_.load}}, normalize, {{_base_.stack}}, {{_base_.pack}}]

# A convolution sees five stacks of 3 frames; the longest recording has 232 stacks.
model = dict(
    encoder=dict(
        embed_dims=96,
        num_layers=1,
        grid=(256,),
        embedding=dict(
            type='aft_mm.ConvFrameEmbedding', num_features=120, num_layers=3, kernel_size=5
        ),
        token_mixer=dict(type='aft_mm.AFTConv', num_heads=8, kernel_size=15),
    ),
    head=dict(embed_dims=96, num_classes=8),
)

# Every fourth recording is for testing. The fifth has one word less than its transcript.
train_dataloader = dict(
    batch_size=4,
    dataset=dict(
        folder,
        pipeline=train_pipeline,
        indices=[1, 2, 3, 6, 7, 8, 10, 11, 12, 14, 15],
    ),
)
val_dataloader = dict(
    batch_size=4,
    dataset=dict(folder, pipeline=test_pipeline, indices=[0, 5, 9, 13], test_mode=True),
)
test_dataloader = val_dataloader
val_evaluator = [dict(type='aft_mm.ErrorRate', per=per) for per in ('character', 'word')]
test_evaluator = val_evaluator

train_cfg = dict(max_epochs=100, val_interval=25)
default_hooks = dict(checkpoint=dict(interval=25))
