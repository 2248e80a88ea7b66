_base_ = '../_base_/recipes/1xb10-250e-logistic_mnist.py'

model = dict(decoder=dict(token_mixer=dict(type='aft_mm.LinearAttention', num_heads=8)))
