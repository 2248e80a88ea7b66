_base_ = './aft-conv-small-h384-k11_8xb128-300e_in1k.py'

# Section 8, eq. 10: Gumbel-softmax over the kernel with tau = 0.5; at inference each head keeps the
# position of the largest w.
model = dict(backbone=dict(token_mixer=dict(sparsity='gumbel', tau=0.5)))
