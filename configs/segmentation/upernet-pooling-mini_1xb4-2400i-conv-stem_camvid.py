# Average pooling in the place of AFT-conv, as a control.
_base_ = './upernet-aft-conv-mini_1xb4-2400i-conv-stem_camvid.py'

model = dict(
    backbone=dict(
        arch=dict(mlp_ratio=458 / 96),  # for equal parameters
        token_mixer=dict(_delete_=True, type='aft_mm.Pooling', kernel_size=7),
    )
)
