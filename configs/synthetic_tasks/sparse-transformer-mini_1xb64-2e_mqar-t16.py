_base_ = './transformer-mini_1xb64-2e_mqar-t16.py'

model = dict(
    decoder=dict(
        token_mixer=dict(_delete_=True, type='aft_mm.StridedAttention', num_heads=1, stride=4),
    )
)
