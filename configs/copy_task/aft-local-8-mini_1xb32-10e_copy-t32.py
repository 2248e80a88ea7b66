_base_ = './transformer-mini_1xb32-10e_copy-t32.py'

model = dict(
    decoder=dict(token_mixer=dict(_delete_=True, type='aft_mm.AFTLocal', window=8, rank=64))
)
