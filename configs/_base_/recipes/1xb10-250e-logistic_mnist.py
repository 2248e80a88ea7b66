_base_ = [
    '../models/ar_logistic.py',
    '../datasets/mnist_ar.py',
    '../schedules/ar_radam_250e.py',
    '../ar_runtime.py',
]

train_dataloader = dict(batch_size=10)
