_base_ = [
    '../_base_/models/ar_logistic.py',
    '../_base_/datasets/mnist_ar.py',
    '../_base_/schedules/ar_radam_250e.py',
    '../_base_/ar_runtime.py',
]

model = dict(decoder=dict(token_mixer=dict(type='aft_mm.SoftmaxAttention', num_heads=8)))

train_dataloader = dict(batch_size=10)
