_base_ = './transformer-mini_1xb16-100e_fsdd.py'

model = dict(encoder=dict(token_mixer=dict(_delete_=True, type='aft_mm.AFTSimple')))
