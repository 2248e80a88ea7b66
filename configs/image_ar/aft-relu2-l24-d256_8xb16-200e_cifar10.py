_base_ = './aft-simple-l24-d256_8xb16-200e_cifar10.py'

# ICLR submission, eq. 6: two terms of the form of AFT-relu.
model = dict(decoder=dict(token_mixer=dict(key_function='relu2', gate='relu')))
