_base_ = './transformer-mini_1xb8-25e_an4-phonemes.py'

model = dict(
    encoder=dict(token_mixer=dict(_delete_=True, type='aft_mm.LinearAttention', num_heads=4))
)
