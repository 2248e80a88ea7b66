_base_ = '../_base_/recipes/1xb100-7e-conv-stem_cifar10full.py'

model = dict(
    backbone=dict(
        arch=dict(mlp_ratio=218 / 96),  # for equal parameters
        token_mixer=[
            dict(type='aft_mm.DepthwiseConv', kernel_size=7),
            dict(type='aft_mm.DepthwiseConv', kernel_size=7),
            dict(type='aft_mm.SoftmaxAttention', num_heads=4),
        ],
        position_embedding=False,
    )
)
