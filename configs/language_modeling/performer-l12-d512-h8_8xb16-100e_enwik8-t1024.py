_base_ = [
    '../_base_/models/ar_bytes.py',
    '../_base_/datasets/enwik8.py',
    '../_base_/schedules/ar_100e.py',
    '../_base_/ar_runtime.py',
]

# The papers give no number of features: d/h ln(d/h) = 267, resampled as in Performer's code.
model = dict(
    decoder=dict(
        embed_dims=512,
        num_layers=12,
        token_mixer=dict(type='aft_mm.PerformerAttention', num_heads=8, redraw=1000),
    ),
    head=dict(embed_dims=512),
)

train_dataloader = dict(batch_size=16)
