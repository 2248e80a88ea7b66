_base_ = '../_base_/recipes/1xb64-10e_copy.py'

model = dict(decoder=dict(token_mixer=dict(type='aft_mm.AFTLocal', window=32, rank=64)))
