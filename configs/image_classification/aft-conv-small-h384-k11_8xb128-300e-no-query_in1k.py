_base_ = './aft-conv-small-h384-k11_8xb128-300e_in1k.py'

# Table 12: without sigmoid(q).
model = dict(backbone=dict(token_mixer=dict(query=False)))
