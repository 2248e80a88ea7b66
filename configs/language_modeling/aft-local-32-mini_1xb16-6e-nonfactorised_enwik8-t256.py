_base_ = './aft-local-32-mini_1xb16-6e_enwik8-t256.py'

# The biases inside the window are free parameters.
model = dict(decoder=dict(token_mixer=dict(rank=None)))
