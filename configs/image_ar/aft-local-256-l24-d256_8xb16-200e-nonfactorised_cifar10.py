_base_ = './aft-local-256-l24-d256_8xb16-200e_cifar10.py'

# Table 3: the biases inside the window are free parameters.
model = dict(decoder=dict(token_mixer=dict(rank=None)))
