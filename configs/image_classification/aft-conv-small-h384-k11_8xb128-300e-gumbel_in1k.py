_base_ = './aft-conv-small-h384-k11_8xb128-300e_in1k.py'

# Section 8, eq. 10: Gumbel-softmax over the kernel with tau = 0.5 in training; at inference each
# head keeps the one position where w is largest.
model = dict(backbone=dict(token_mixer=dict(sparsity='gumbel', tau=0.5)))
