_base_ = './aft-local-32-mini_1xb16-6e_enwik8-t256.py'

# A control. An MLP of 561 channels, for equal parameters.
model = dict(
    decoder=dict(
        mlp_ratio=561 / 128,
        token_mixer=dict(_delete_=True, type='aft_mm.DepthwiseConv', kernel_size=31),
    )
)
