_base_ = './transformer-mini_1xb16-100e_fsdd.py'

model = dict(
    encoder=dict(
        token_mixer=dict(_delete_=True, type='aft_mm.AFTConv', num_heads=8, kernel_size=15)
    )
)
