_base_ = './transformer-mini_1xb64-2e_mqar-t16.py'

# An MLP of 126 channels, for equal parameters.
model = dict(
    decoder=dict(
        mlp_ratio=126 / 64,
        token_mixer=[
            dict(type='aft_mm.SoftmaxAttention', num_heads=1),
            dict(type='aft_mm.AFTFull', rank=16),
        ],
    )
)
