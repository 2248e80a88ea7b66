_base_ = './aft-conv-small-h384-k11_8xb128-300e_in1k.py'

# Ours (table 10: a 7 x 7 kernel): w itself is the parameter, without equation 8.
model = dict(backbone=dict(token_mixer=dict(reparameterize=False)))
