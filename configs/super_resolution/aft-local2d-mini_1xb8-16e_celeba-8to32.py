# AFT-local2d on CelebA, 8 x 8 to 32 x 32 pixels: 4.599 bits per dim on the test set.
#     aft_mm train aft-local2d-mini_1xb8-16e_celeba-8to32 --amp
# The number is of a run with --cfg-options model.decoder.token_mixer.init_std=0.01.
_base_ = [
    '../_base_/models/super_resolution.py',
    '../_base_/datasets/celeba_8to32.py',
    '../_base_/schedules/ar_mini.py',
    '../_base_/ar_runtime.py',
]

# Ours: AFT reads the input too, where the paper has softmax attention.
model = dict(
    encoder=dict(
        embed_dims=128,
        num_layers=2,
        token_mixer=dict(_delete_=True, type='aft_mm.AFTFull', rank=None),
    ),
    decoder=dict(
        embed_dims=128,
        num_layers=4,
        token_mixer=dict(type='aft_mm.AFTLocal', window=(4, 4), rank=32),
        # Starts at equal positions, which softmax attention has to find.
        cross_mixer=dict(
            _delete_=True, type='aft_mm.AFTFull', rank=None, grid=(32, 32), source_grid=(8, 8)
        ),
    ),
    head=dict(embed_dims=128),
)

# A few hundred faces: each is seen from both sides.
train_dataloader = dict(
    batch_size=8,
    num_workers=1,
    dataset=dict(
        pipeline=[
            dict(type='aft_mm.LoadRGBImage'),
            dict(type='mmpretrain.RandomFlip', prob=0.5, direction='horizontal'),
            dict(type='aft_mm.SuperResolutionPair', size=32, scale_factor=4, crop_size=138),
            dict(type='aft_mm.PackSequence', image_shape={{_base_.image_shape}}, tokens='pixels'),
        ]
    ),
)
val_dataloader = dict(num_workers=1)
test_dataloader = dict(num_workers=1)

# Large steps for a small model, but not for the head, whose 128 inputs move a mean together.
optim_wrapper = dict(
    optimizer=dict(lr=1e-2),
    paramwise_cfg=dict(
        custom_keys={'head': dict(lr_mult=0.1), 'head.proj.bias': dict(lr_mult=0.1, decay_mult=0.0)}
    ),
)
train_cfg = dict(max_epochs=16, val_interval=4)
test_cfg = dict(type='aft_mm.GenerationTestLoop', num_samples=4, temperature=0.8)
default_hooks = dict(data_report=dict(type='aft_mm.SkippedDataReportHook'))
custom_hooks = [
    dict(
        type='aft_mm.SuperResolutionHook',
        image_shape={{_base_.image_shape}},
        source_shape={{_base_.source_shape}},
        interval=4,
    )
]
