_base_ = './transformer-mini_1xb32-1e_listops-t128.py'

# An MLP of 160 channels, for equal parameters.
model = dict(
    decoder=dict(
        mlp_ratio=160 / 64,
        token_mixer=dict(_delete_=True, type='aft_mm.TokenShift'),
    )
)
