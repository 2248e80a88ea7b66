_base_ = [
    '../_base_/models/ar_subpixels.py',
    '../_base_/datasets/cifar10_ar.py',
    '../_base_/schedules/ar_200e.py',
    '../_base_/ar_runtime.py',
]

# W = 1 in a block of 8 x 8 sub-pixels that ends at the target and in one to the right above it, on
# the raster of 32 rows of 96, W = 0 outside.
# Blocks are recomputed: their activations would take 31 GB of a GPU.
model = dict(
    decoder=dict(
        with_cp=True,
        grid=(32, 32 * 3),
        token_mixer=dict(type='aft_mm.AFTLocalHard', window=(16, 16)),
    )
)

train_dataloader = dict(batch_size=16)
