_base_ = './aft-conv-small-h384-k11_8xb128-300e_in1k.py'

# 27 = 2 * 14 - 1: every offset of the 14 x 14 grid has a bias.
model = dict(backbone=dict(token_mixer=dict(kernel_size=27)))
