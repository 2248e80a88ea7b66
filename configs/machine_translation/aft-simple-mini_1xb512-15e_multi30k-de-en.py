_base_ = './transformer-mini_1xb512-15e_multi30k-de-en.py'

model = dict(decoder=dict(token_mixer=dict(_delete_=True, type='aft_mm.AFTSimple')))
