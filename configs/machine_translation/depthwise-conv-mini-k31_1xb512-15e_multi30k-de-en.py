_base_ = './transformer-mini_1xb512-15e_multi30k-de-en.py'

# A control that sees 16 tokens, as AFT-local-16. An MLP of 313 channels, for equal parameters.
model = dict(
    decoder=dict(
        mlp_ratio=313 / 128,
        token_mixer=dict(_delete_=True, type='aft_mm.DepthwiseConv', kernel_size=31),
    )
)
