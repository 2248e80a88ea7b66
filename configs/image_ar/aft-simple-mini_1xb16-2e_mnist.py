_base_ = './aft-local-32-mini_1xb16-2e_mnist.py'

model = dict(decoder=dict(token_mixer=dict(_delete_=True, type='aft_mm.AFTSimple')))
