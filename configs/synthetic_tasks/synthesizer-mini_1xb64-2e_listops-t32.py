_base_ = './transformer-mini_1xb64-2e_listops-t32.py'

# An MLP of 144 channels, for equal parameters.
model = dict(
    decoder=dict(
        mlp_ratio=144 / 64,
        token_mixer=dict(_delete_=True, type='aft_mm.DenseSynthesizer', num_heads=1),
    )
)
