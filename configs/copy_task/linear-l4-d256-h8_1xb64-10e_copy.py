_base_ = [
    '../_base_/models/ar_copy.py',
    '../_base_/datasets/copy_task.py',
    '../_base_/schedules/ar_radam_copy.py',
    '../_base_/ar_runtime.py',
]

model = dict(decoder=dict(token_mixer=dict(type='aft_mm.LinearAttention', num_heads=8)))

train_dataloader = dict(batch_size=64)
