_base_ = [
    '../_base_/models/ar_subpixels.py',
    '../_base_/datasets/cifar10_ar.py',
    '../_base_/schedules/ar_200e.py',
    '../_base_/ar_runtime.py',
]

# Windows of 16 x 16 sub-pixels on the raster of 32 rows of 96. Blocks are recomputed: their
# activations would take 31 GB of a GPU.
model = dict(
    decoder=dict(
        with_cp=True,
        grid=(32, 32 * 3),
        token_mixer=dict(type='aft_mm.AFTLocalHard', window=(16, 16)),
    )
)

train_dataloader = dict(batch_size=16)
