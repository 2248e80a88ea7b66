# CelebA, <data_root>/img_align_celeba/*.jpg and list_eval_partition.txt, as pairs of 8 x 8 and 32 x
# 32 pixels. The paper's "dev" is `val`.
data_root = '{{$AFT_MM_DATA:data}}/celeba'
image_shape = (32, 32, 3)
source_shape = (8, 8, 3)

# The middle 138 x 138 of 218 x 178 pixels, as in the code of the Image Transformer; the paper names
# no crop.
pipeline = [
    dict(type='aft_mm.LoadRGBImage'),
    dict(type='aft_mm.SuperResolutionPair', size=32, scale_factor=4, crop_size=138),
    dict(type='aft_mm.PackSequence', image_shape=image_shape, tokens='pixels'),
]

train_dataloader = dict(
    num_workers=4,
    persistent_workers=False,
    drop_last=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(type='aft_mm.CelebA', data_root=data_root, split='train', pipeline=pipeline),
)

val_dataloader = dict(
    batch_size=16,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='aft_mm.CelebA', data_root=data_root, split='val', pipeline=pipeline, test_mode=True
    ),
)
val_evaluator = dict(type='aft_mm.Likelihood', per='dim')

test_dataloader = dict(
    batch_size=16,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='aft_mm.CelebA', data_root=data_root, split='test', pipeline=pipeline, test_mode=True
    ),
)
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
