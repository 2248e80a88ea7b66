_base_ = [
    '../_base_/models/ar_subpixels.py',
    '../_base_/datasets/cifar10_ar.py',
    '../_base_/schedules/ar_200e.py',
    '../_base_/ar_runtime.py',
]

# Blocks are recomputed: their activations would take 30 GB of a GPU.
model = dict(
    decoder=dict(
        with_cp=True,
        embed_dims=512,
        num_layers=12,
        token_mixer=dict(type='aft_mm.AFTLocal', window=256, rank=128),
    ),
    head=dict(embed_dims=512),
)

train_dataloader = dict(batch_size=16)
