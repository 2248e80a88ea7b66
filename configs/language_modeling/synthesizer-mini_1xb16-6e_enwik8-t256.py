_base_ = './aft-local-32-mini_1xb16-6e_enwik8-t256.py'

# An MLP of 445 channels, for equal parameters.
model = dict(
    decoder=dict(
        mlp_ratio=445 / 128,
        token_mixer=dict(_delete_=True, type='aft_mm.DenseSynthesizer', num_heads=4),
    )
)
