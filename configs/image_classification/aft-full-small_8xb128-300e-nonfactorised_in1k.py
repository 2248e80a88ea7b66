_base_ = './aft-full-small_8xb128-300e_in1k.py'

# Table 9: w is a free T x T matrix, T = 197.
model = dict(backbone=dict(token_mixer=dict(rank=None)))
