_base_ = './aft-local2d-hard-l32-d256_8xb16-200e_celeba-8to32.py'

# Ours, no attention at all: the encoder is AFT too, and the decoder reads its memory by a learned
# bias, which starts at equal positions.
model = dict(
    encoder=dict(token_mixer=dict(_delete_=True, type='aft_mm.AFTFull', rank=None)),
    decoder=dict(
        cross_mixer=dict(
            _delete_=True, type='aft_mm.AFTFull', rank=None, grid=(32, 32), source_grid=(8, 8)
        )
    ),
)
