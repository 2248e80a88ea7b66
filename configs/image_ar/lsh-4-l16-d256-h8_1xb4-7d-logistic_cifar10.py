_base_ = [
    '../_base_/models/ar_logistic.py',
    '../_base_/datasets/cifar10_ar.py',
    '../_base_/schedules/ar_radam_7d.py',
    '../_base_/ar_runtime.py',
]

# Fewer pairs and a lower recall than in the paper, see docs/mixers.md#recall-of-lsh.
model = dict(
    decoder=dict(
        num_layers=16,
        grid=(32 * 32 * 3,),
        token_mixer=dict(
            type='aft_mm.LSHAttention', num_heads=8, num_rounds=4, num_buckets=64, chunk_size=32
        ),
    )
)

# The paper names no augmentation, so there is none.
train_dataloader = dict(batch_size=4, dataset=dict(pipeline={{_base_.test_pipeline}}))
default_hooks = dict(
    checkpoint=dict(by_epoch=False, interval=2000),
    time_budget=dict(type='aft_mm.TimeBudgetHook', days=7),
)
