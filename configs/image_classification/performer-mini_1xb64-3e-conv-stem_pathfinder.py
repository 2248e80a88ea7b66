_base_ = './deit-mini_1xb64-3e-conv-stem_pathfinder.py'

model = dict(
    backbone=dict(
        token_mixer=dict(_delete_=True, type='aft_mm.PerformerAttention', num_heads=4, redraw=1000),
    )
)

optim_wrapper = dict(optimizer=dict(lr=1e-3))
