_base_ = './transformer-mini_1xb64-2e_mqar-t16.py'

model = dict(
    decoder=dict(
        token_mixer=[
            dict(type='aft_mm.AFTSimple'),
            dict(type='aft_mm.SoftmaxAttention', num_heads=1),
        ]
    )
)
