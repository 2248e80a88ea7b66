_base_ = './transformer-mini_1xb32-1e_listops-t128.py'

# 50 channels and an MLP of 104, for equal parameters: an LSTM has twice those of attention.
model = dict(
    decoder=dict(
        embed_dims=50,
        mlp_ratio=104 / 50,
        token_mixer=dict(_delete_=True, type='aft_mm.LSTM'),
    ),
    head=dict(embed_dims=50),
)
