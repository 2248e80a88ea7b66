_base_ = './transformer-l9-h6_1xb16-100e_librispeech-100.py'

model = dict(
    encoder=dict(
        token_mixer=dict(_delete_=True, type='aft_mm.AFTConv', num_heads=6, kernel_size=15)
    )
)
