_base_ = [
    '../_base_/models/ar_subpixels.py',
    '../_base_/datasets/cifar10_ar.py',
    '../_base_/schedules/ar_200e.py',
    '../_base_/ar_runtime.py',
]

# Queries, keys and MLP of half the width and stride 128, as in arXiv 1904.10509, §7.2.
model = dict(
    decoder=dict(
        num_layers=128,
        mlp_ratio=2.0,
        with_cp=True,
        token_mixer=dict(type='aft_mm.StridedAttention', num_heads=2, stride=128, qk_dims=128),
    )
)

train_dataloader = dict(batch_size=4)
auto_scale_lr = dict(base_batch_size=32)
