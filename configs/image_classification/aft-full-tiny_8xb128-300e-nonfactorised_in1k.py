_base_ = './aft-full-tiny_8xb128-300e_in1k.py'

# Ours, table 9 has it for AFT-full small: w is a free T x T matrix, T = 197.
model = dict(backbone=dict(token_mixer=dict(rank=None)))
