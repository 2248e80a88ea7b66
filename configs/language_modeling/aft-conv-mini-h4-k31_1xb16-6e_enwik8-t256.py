_base_ = './aft-local-32-mini_1xb16-6e_enwik8-t256.py'

# An MLP of 574 channels, for equal parameters.
model = dict(
    decoder=dict(
        mlp_ratio=574 / 128,
        token_mixer=dict(_delete_=True, type='aft_mm.AFTConv', num_heads=4, kernel_size=31),
    )
)
