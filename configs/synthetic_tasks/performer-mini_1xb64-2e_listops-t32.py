_base_ = './transformer-mini_1xb64-2e_listops-t32.py'

model = dict(
    decoder=dict(
        token_mixer=dict(_delete_=True, type='aft_mm.PerformerAttention', num_heads=1, redraw=1000),
    )
)
