# AFT-local-32 on MNIST, pixel by pixel: 1.028 bits per dim.
#     aft_mm train aft-local-32-mini_1xb16-2e_mnist --amp
# The number is of a run with --cfg-options model.decoder.token_mixer.init_std=0.01.
_base_ = [
    '../_base_/models/ar_subpixels.py',
    '../_base_/datasets/mnist_ar.py',
    '../_base_/schedules/ar_mini.py',
    '../_base_/ar_runtime.py',
]

model = dict(
    decoder=dict(
        embed_dims=128,
        num_layers=4,
        grid=(28 * 28,),
        drop_rate=0.0,
        token_mixer=dict(type='aft_mm.AFTLocal', window=32, rank=32),
    ),
    head=dict(embed_dims=128),
)

# 500 batches an epoch and a fifth of the test set: minutes on a CPU.
train_dataloader = dict(batch_size=16, dataset=dict(indices=8000))
val_dataloader = dict(dataset=dict(indices=1500))
train_cfg = dict(max_epochs=2)
custom_hooks = [
    dict(type='aft_mm.SampleHook', image_shape={{_base_.image_shape}}, interval=1, num_samples=16)
]
