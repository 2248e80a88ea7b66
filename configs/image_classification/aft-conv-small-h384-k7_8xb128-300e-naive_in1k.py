_base_ = './aft-conv-small-h384-k11_8xb128-300e_in1k.py'

# Table 10: w itself is the parameter, without equation 8.
model = dict(backbone=dict(token_mixer=dict(kernel_size=7, reparameterize=False)))
