_base_ = './transformer-mini_1xb64-2e_mqar-t16.py'

# 50 channels and an MLP of 106, for equal parameters: an LSTM has twice those of attention.
model = dict(
    decoder=dict(
        embed_dims=50,
        mlp_ratio=106 / 50,
        token_mixer=dict(_delete_=True, type='aft_mm.LSTM'),
    ),
    head=dict(embed_dims=50),
)
