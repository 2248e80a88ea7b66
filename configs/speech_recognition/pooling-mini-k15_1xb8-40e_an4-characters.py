_base_ = './transformer-mini_1xb8-40e_an4-characters.py'

# A control, as large as AFT-conv.
model = dict(encoder=dict(token_mixer=dict(_delete_=True, type='aft_mm.Pooling', kernel_size=15)))
