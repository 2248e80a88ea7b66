# AFT-local-learned-32 on MNIST, pixel by pixel: 1.046 bits per dim.
#     aft_mm train aft-local-learned-32-mini_1xb16-2e_mnist --amp
_base_ = './aft-local-32-mini_1xb16-2e_mnist.py'

model = dict(decoder=dict(token_mixer=dict(type='aft_mm.AFTLocalLearned')))
