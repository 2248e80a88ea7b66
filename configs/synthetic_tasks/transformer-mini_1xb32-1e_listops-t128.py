_base_ = [
    '../_base_/models/ar_synthetic.py',
    '../_base_/datasets/listops.py',
    '../_base_/schedules/ar_synthetic.py',
    '../_base_/ar_runtime.py',
]

model = dict(
    decoder=dict(
        embedding=dict(vocab_size=16),
        grid=(128,),
        token_mixer=dict(type='aft_mm.SoftmaxAttention', num_heads=1),
    ),
    head=dict(num_classes=16),
)

# Five levels and up to five elements per list.
train_dataloader = dict(
    batch_size=32,
    dataset=dict(max_length=128, min_length=33, max_depth=5, max_args=5),
)
val_dataloader = dict(
    dataset=dict(max_length=128, min_length=33, max_depth=5, max_args=5),
)
test_dataloader = dict(
    dataset=dict(max_length=128, min_length=33, max_depth=5, max_args=5),
)
train_cfg = dict(max_epochs=1)
default_hooks = dict(logger=dict(interval=20))
