_base_ = [
    '../_base_/models/ar_subpixels.py',
    '../_base_/datasets/cifar10_ar.py',
    '../_base_/schedules/ar_mini.py',
    '../_base_/ar_runtime.py',
]

model = dict(
    decoder=dict(
        embed_dims=128,
        num_layers=4,
        drop_rate=0.0,
        token_mixer=dict(type='aft_mm.AFTLocal', window=256, rank=32),
    ),
    head=dict(embed_dims=128),
)

# 750 batches and a fifth of the test set: minutes on a CPU.
train_dataloader = dict(batch_size=4, dataset=dict(indices=3000))
val_dataloader = dict(dataset=dict(indices=150))
train_cfg = dict(max_epochs=1)
custom_hooks = [
    dict(type='aft_mm.SampleHook', image_shape={{_base_.image_shape}}, interval=1, num_samples=4)
]
