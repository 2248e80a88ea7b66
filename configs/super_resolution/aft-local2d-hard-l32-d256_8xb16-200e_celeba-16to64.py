_base_ = './aft-local2d-hard-l32-d256_8xb16-200e_celeba-8to32.py'

# Ours: the paper has 8 x 8 to 32 x 32 only.
image_shape = (64, 64, 3)
source_shape = (16, 16, 3)
pipeline = [
    dict(type='aft_mm.LoadRGBImage'),
    dict(type='aft_mm.SuperResolutionPair', size=64, scale_factor=4, crop_size=138),
    dict(type='aft_mm.PackSequence', image_shape=image_shape, tokens='pixels'),
]

# Blocks are recomputed: their activations would take 66 GB of a GPU.
model = dict(encoder=dict(grid=(16, 16)), decoder=dict(with_cp=True, grid=(64, 64)))

train_dataloader = dict(dataset=dict(pipeline=pipeline))
val_dataloader = dict(dataset=dict(pipeline=pipeline))
test_dataloader = dict(dataset=dict(pipeline=pipeline))
test_evaluator = [
    dict(type='aft_mm.Likelihood', per='dim'),
    dict(type='aft_mm.ImageQuality', image_shape=image_shape, source_shape=source_shape),
]
custom_hooks = [
    dict(
        type='aft_mm.SuperResolutionHook',
        image_shape=image_shape,
        source_shape=source_shape,
        interval=10,
    )
]
