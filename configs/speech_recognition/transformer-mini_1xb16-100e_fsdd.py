# Spoken digits (FSDD), one unit per word, one layer behind three convolutions.
#     aft_mm train transformer-mini_1xb16-100e_fsdd
_base_ = [
    '../_base_/models/ctc_encoder.py',
    '../_base_/datasets/fsdd.py',
    '../_base_/schedules/ctc_mini.py',
    '../_base_/ar_runtime.py',
]

# The convolutions see 57 frames, a word; the longest recording has 38 stacks of 3 frames.
model = dict(
    lexicon=dict(units={{_base_.units}}, words={{_base_.words}}),
    encoder=dict(
        embed_dims=96,
        num_layers=1,
        grid=(64,),
        embedding=dict(
            type='aft_mm.ConvFrameEmbedding', num_features=120, num_layers=3, kernel_size=7
        ),
        token_mixer=dict(type='aft_mm.SoftmaxAttention', num_heads=4),
    ),
    head=dict(embed_dims=96, num_classes=12),
)

train_dataloader = dict(batch_size=16)
train_cfg = dict(max_epochs=100, val_interval=50)
default_hooks = dict(checkpoint=dict(interval=50))
optim_wrapper = dict(optimizer=dict(lr=4e-3))
