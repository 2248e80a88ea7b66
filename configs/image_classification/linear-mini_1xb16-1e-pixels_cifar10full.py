_base_ = './deit-mini_1xb16-1e-pixels_cifar10full.py'

model = dict(
    backbone=dict(
        token_mixer=dict(_delete_=True, type='aft_mm.LinearAttention', num_heads=4),
    )
)
