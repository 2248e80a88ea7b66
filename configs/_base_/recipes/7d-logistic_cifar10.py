_base_ = [
    '../models/ar_logistic.py',
    '../datasets/cifar10_ar.py',
    '../schedules/ar_radam_7d.py',
    '../ar_runtime.py',
]

# The paper names no augmentation, so there is none.
train_dataloader = dict(batch_size=4, dataset=dict(pipeline={{_base_.test_pipeline}}))
default_hooks = dict(
    checkpoint=dict(by_epoch=False, interval=2000),
    time_budget=dict(type='aft_mm.TimeBudgetHook', days=7),
)
