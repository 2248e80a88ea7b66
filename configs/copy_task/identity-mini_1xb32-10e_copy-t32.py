_base_ = './transformer-mini_1xb32-10e_copy-t32.py'

# A control. An MLP of 288 channels, for equal parameters.
model = dict(
    decoder=dict(mlp_ratio=288 / 64, token_mixer=dict(_delete_=True, type='aft_mm.Identity'))
)
