_base_ = './deit-mini_1xb64-3e-conv-stem_pathfinder.py'

# An MLP of 126 channels, for equal parameters.
model = dict(
    backbone=dict(
        arch=dict(mlp_ratio=126 / 64),
        token_mixer=dict(_delete_=True, type='aft_mm.DenseSynthesizer', num_heads=4),
    )
)
