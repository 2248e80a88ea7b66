_base_ = './aft-local2d-hard-l32-d256_8xb16-200e_celeba-8to32.py'

# Ours: the encoder is AFT too. The decoder reads its memory by softmax attention.
model = dict(encoder=dict(token_mixer=dict(_delete_=True, type='aft_mm.AFTFull', rank=None)))
