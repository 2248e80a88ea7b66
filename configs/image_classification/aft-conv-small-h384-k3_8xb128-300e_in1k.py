_base_ = './aft-conv-small-h384-k11_8xb128-300e_in1k.py'

model = dict(backbone=dict(token_mixer=dict(kernel_size=3)))
