_base_ = [
    '../_base_/models/ar_subpixels.py',
    '../_base_/datasets/cifar10_ar.py',
    '../_base_/schedules/ar_200e.py',
    '../_base_/ar_runtime.py',
]

# The Image Transformer's 2-d blocks of 256 sub-pixels on the raster of 32 rows of 96.
model = dict(
    decoder=dict(
        embed_dims=512,
        num_layers=12,
        grid=(32, 32 * 3),
        token_mixer=dict(type='aft_mm.LocalSoftmaxAttention', num_heads=4, window=(16, 16)),
    ),
    head=dict(embed_dims=512),
)

# Table 2: batch 32.
train_dataloader = dict(batch_size=4)
auto_scale_lr = dict(base_batch_size=32)
