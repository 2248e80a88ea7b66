_base_ = [
    '../_base_/models/ar_bytes.py',
    '../_base_/datasets/enwik8.py',
    '../_base_/schedules/ar_mini.py',
    '../_base_/ar_runtime.py',
]

model = dict(
    decoder=dict(
        embed_dims=128,
        num_layers=4,
        grid=(256,),
        drop_rate=0.0,
        token_mixer=dict(type='aft_mm.AFTLocal', window=32, rank=64),
    ),
    head=dict(embed_dims=128),
)

# 500 batches an epoch; the mini leaves differ in the token mixer only.
train_dataloader = dict(batch_size=16, dataset=dict(context_length=256, samples_per_epoch=8000))
val_dataloader = dict(batch_size=64, dataset=dict(context_length=256))
test_dataloader = dict(batch_size=64, dataset=dict(context_length=256))
train_cfg = dict(max_epochs=6)
