_base_ = [
    '../_base_/models/ar_copy.py',
    '../_base_/datasets/copy_task.py',
    '../_base_/schedules/ar_radam_copy.py',
    '../_base_/ar_runtime.py',
]

# For a CPU: 64 channels, 32 tokens, 1,000 updates of 32 sequences, the last 200 at 1e-4.
model = dict(
    decoder=dict(
        embed_dims=64, grid=(32,), token_mixer=dict(type='aft_mm.SoftmaxAttention', num_heads=8)
    ),
    head=dict(embed_dims=64),
)

train_dataloader = dict(batch_size=32, dataset=dict(max_length=32, num_samples=3200))
val_dataloader = dict(dataset=dict(max_length=32))
test_dataloader = dict(dataset=dict(max_length=32))

param_scheduler = [dict(type='MultiStepLR', milestones=[800], gamma=0.1, by_epoch=False)]
train_cfg = dict(val_interval=2)
auto_scale_lr = dict(base_batch_size=32)
default_hooks = dict(logger=dict(interval=20))
