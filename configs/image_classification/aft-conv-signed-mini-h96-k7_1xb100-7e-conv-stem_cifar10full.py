_base_ = '../_base_/recipes/1xb100-7e-conv-stem_cifar10full.py'

model = dict(
    backbone=dict(
        arch=dict(mlp_ratio=152 / 96),  # for equal parameters
        token_mixer=dict(type='aft_mm.AFTConvSigned', num_heads=96, kernel_size=7),
        position_embedding=False,
    )
)
