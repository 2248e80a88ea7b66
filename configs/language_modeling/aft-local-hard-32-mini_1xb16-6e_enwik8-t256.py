_base_ = './aft-local-32-mini_1xb16-6e_enwik8-t256.py'

model = dict(decoder=dict(token_mixer=dict(_delete_=True, type='aft_mm.AFTLocalHard', window=32)))
