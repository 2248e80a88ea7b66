_base_ = [
    '../_base_/models/ar_copy.py',
    '../_base_/datasets/copy_task.py',
    '../_base_/schedules/ar_radam_copy.py',
    '../_base_/ar_runtime.py'
]

# 64 channels for a CPU.
model = dict(
    decoder=dict(
        embed_dims=64,
        token_mixer=dict(type='aft_mm.LinearAttention', num_heads=8)),
    head=dict(embed_dims=64))

train_dataloader = dict(batch_size=64)
