_base_ = './aft-local2d-hard-l32-d256_8xb16-200e_celeba-8to32.py'

# Ours: learned biases less than 8 rows and columns away; farther pixels count with W = 1.
model = dict(
    decoder=dict(token_mixer=dict(_delete_=True, type='aft_mm.AFTLocal', window=(8, 8), rank=64))
)
