# AFT-local-32 on enwik8, byte by byte with 256 bytes of context: 2.308 bits per character.
#     aft_mm train aft-local-32-mini_1xb16-6e_enwik8-t256 --amp
# The number is of a run with --cfg-options model.decoder.token_mixer.init_std=0.01.
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

# 500 batches an epoch; the mini configs differ only in the token mixer.
train_dataloader = dict(batch_size=16, dataset=dict(context_length=256, samples_per_epoch=8000))
val_dataloader = dict(batch_size=64, dataset=dict(context_length=256))
test_dataloader = dict(batch_size=64, dataset=dict(context_length=256))
train_cfg = dict(max_epochs=6)
