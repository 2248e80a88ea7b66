_base_ = '../_base_/recipes/1xb100-7e-conv-stem_cifar10full.py'

model = dict(
    backbone=dict(
        token_mixer=dict(type='aft_mm.SoftmaxAttention', num_heads=4),
        position_embedding=True,
    )
)
