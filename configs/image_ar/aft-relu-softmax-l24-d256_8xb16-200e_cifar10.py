_base_ = './aft-simple-l24-d256_8xb16-200e_cifar10.py'

# ICLR submission, §3.1: relu(q) as the gate, keys through a softmax.
model = dict(decoder=dict(token_mixer=dict(gate='relu')))
