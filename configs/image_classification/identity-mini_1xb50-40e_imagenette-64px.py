_base_ = './aft-conv-mini-h96-k7_1xb50-40e_imagenette-64px.py'

# A control. An MLP of 457 channels, for equal parameters.
model = dict(
    backbone=dict(
        arch=dict(mlp_ratio=457 / 96),
        token_mixer=dict(_delete_=True, type='aft_mm.Identity'),
    )
)
