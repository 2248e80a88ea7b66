_base_ = './aft-simple-l24-d256_8xb16-200e_cifar10.py'

# ICLR submission, eq. 3: relu(q) ⊙ Σ relu(k) ⊙ v, without a denominator.
model = dict(decoder=dict(token_mixer=dict(key_function='relu', gate='relu')))
