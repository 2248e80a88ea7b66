# AFT-local-32 on CIFAR-10, three colours at once: 4.789 bits per dim.
#     aft_mm train aft-local-32-mini_1xb8-2e-pixels_cifar10 --amp
# The number is of a run with --cfg-options model.decoder.token_mixer.init_std=0.01.
_base_ = [
    '../_base_/models/ar_logistic.py',
    '../_base_/datasets/cifar10_ar.py',
    '../_base_/schedules/ar_mini.py',
    '../_base_/ar_runtime.py',
]

# Whole pixels, T = 1024: the mixture of PixelCNN++, whose green depends on red, and blue on both.
model = dict(
    decoder=dict(
        embed_dims=128,
        num_layers=4,
        embedding=dict(_delete_=True, type='aft_mm.PixelEmbedding', num_channels=3),
        grid=(32 * 32,),
        drop_rate=0.0,
        token_mixer=dict(type='aft_mm.AFTLocal', window=32, rank=32),
    ),
    head=dict(embed_dims=128, num_channels=3),
)

test_pipeline = [
    dict(type='aft_mm.PackSequence', image_shape={{_base_.image_shape}}, tokens='pixels')
]
train_dataloader = dict(
    batch_size=8,
    dataset=dict(
        pipeline=[
            dict(type='mmpretrain.RandomFlip', prob=0.5, direction='horizontal'),
            dict(type='aft_mm.RandomValueShift', max_shift=10),
            *test_pipeline,
        ]
    ),
)
val_dataloader = dict(dataset=dict(indices=150, pipeline=test_pipeline))
test_dataloader = dict(dataset=dict(pipeline=test_pipeline))
train_cfg = dict(max_epochs=2)
custom_hooks = [
    dict(type='aft_mm.SampleHook', image_shape={{_base_.image_shape}}, interval=1, num_samples=4)
]
