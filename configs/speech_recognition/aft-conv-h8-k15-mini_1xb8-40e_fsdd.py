# AFT-conv on spoken digits (FSDD), one unit per word: 12.8 % word errors among the ten words.
#     aft_mm train aft-conv-h8-k15-mini_1xb8-40e_fsdd
_base_ = [
    '../_base_/models/ctc_encoder.py',
    '../_base_/datasets/fsdd.py',
    '../_base_/schedules/ctc_mini.py',
    '../_base_/ar_runtime.py',
]

# Two layers for a CPU; the longest recording has 113 frames.
model = dict(
    lexicon=dict(units={{_base_.units}}, words={{_base_.words}}),
    encoder=dict(
        embed_dims=96,
        num_layers=2,
        grid=(256,),
        drop_rate=0.1,
        embedding=dict(type='aft_mm.ConvFrameEmbedding'),
        token_mixer=dict(type='aft_mm.AFTConv', num_heads=8, kernel_size=15),
    ),
    head=dict(embed_dims=96, num_classes=12),
)

train_dataloader = dict(batch_size=8)
train_cfg = dict(max_epochs=40, val_interval=5)
