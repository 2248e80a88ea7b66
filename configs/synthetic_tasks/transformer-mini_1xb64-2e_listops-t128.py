_base_ = [
    '../_base_/models/ar_synthetic.py',
    '../_base_/datasets/listops_128.py',
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

train_dataloader = dict(batch_size=64)
train_cfg = dict(max_epochs=2)
default_hooks = dict(logger=dict(interval=20))
