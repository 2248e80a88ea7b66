_base_ = './transformer-mini_1xb32-10e_copy-t32.py'

# An MLP of 285 channels, for equal parameters.
model = dict(
    decoder=dict(
        mlp_ratio=285 / 64,
        token_mixer=dict(_delete_=True, type='aft_mm.AFTConv', num_heads=4, kernel_size=31),
    )
)
