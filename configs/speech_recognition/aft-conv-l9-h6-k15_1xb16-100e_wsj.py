_base_ = '../_base_/recipes/1xb16-100e_wsj.py'

model = dict(encoder=dict(token_mixer=dict(type='aft_mm.AFTConv', num_heads=6, kernel_size=15)))
