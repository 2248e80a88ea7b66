_base_ = [
    '../_base_/models/ar_bytes.py',
    '../_base_/datasets/enwik8.py',
    '../_base_/schedules/ar_100e.py',
    '../_base_/ar_runtime.py',
]

# ICLR submission, table 3: d_u = 256.
model = dict(
    decoder=dict(
        embed_dims=512,
        num_layers=12,
        token_mixer=dict(type='aft_mm.AFTLocalLearned', window=32, rank=256),
    ),
    head=dict(embed_dims=512),
)

train_dataloader = dict(batch_size=16)
