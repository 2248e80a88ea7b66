_base_ = './transformer-mini_1xb64-2e_listops-t128.py'

model = dict(
    decoder=dict(
        token_mixer=dict(num_heads=4),
    )
)
