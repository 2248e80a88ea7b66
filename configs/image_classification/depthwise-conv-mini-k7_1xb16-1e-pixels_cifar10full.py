_base_ = './deit-mini_1xb16-1e-pixels_cifar10full.py'

model = dict(
    backbone=dict(
        arch=dict(mlp_ratio=136 / 64),  # for equal parameters
        token_mixer=dict(_delete_=True, type='aft_mm.DepthwiseConv', kernel_size=7),
    )
)
