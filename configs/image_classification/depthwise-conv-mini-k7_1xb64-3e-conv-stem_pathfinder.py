_base_ = './deit-mini_1xb64-3e-conv-stem_pathfinder.py'

# An MLP of 136 channels, for equal parameters.
model = dict(
    backbone=dict(
        arch=dict(mlp_ratio=136 / 64),
        token_mixer=dict(_delete_=True, type='aft_mm.DepthwiseConv', kernel_size=7),
    )
)

optim_wrapper = dict(optimizer=dict(lr=1e-3))
