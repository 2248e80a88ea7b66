_base_ = './transformer-mini_1xb64-2e_mqar-t16.py'

# An MLP of 152 channels, for equal parameters.
model = dict(
    decoder=dict(
        mlp_ratio=152 / 64,
        token_mixer=dict(_delete_=True, type='aft_mm.DenseSynthesizer', num_heads=1),
    )
)
