_base_ = [
    '../_base_/models/ar_bytes.py',
    '../_base_/datasets/enwik8.py',
    '../_base_/schedules/ar_100e.py',
    '../_base_/ar_runtime.py',
]

model = dict(
    decoder=dict(
        embed_dims=512, num_layers=12, token_mixer=dict(type='aft_mm.DenseSynthesizer', num_heads=8)
    ),
    head=dict(embed_dims=512),
)

train_dataloader = dict(batch_size=16)
