_base_ = [
    '../models/ar_copy.py',
    '../datasets/copy_task.py',
    '../schedules/ar_radam_copy.py',
    '../ar_runtime.py',
]

train_dataloader = dict(batch_size=64)
