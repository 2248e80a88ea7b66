# mmdet's 12 epochs with AdamW, as plain backbones are trained (arXiv 2203.16527, appendix), and
# layer-wise decay of the learning rate.
_base_ = 'mmdet::_base_/schedules/schedule_1x.py'

optim_wrapper = dict(
    _delete_=True,
    type='OptimWrapper',
    constructor='aft_mm.LayerDecayOptimWrapperConstructor',
    optimizer=dict(type='AdamW', lr=1e-4, betas=(0.9, 0.999), weight_decay=0.1),
    paramwise_cfg=dict(
        decay_rate=0.8,
        norm_decay_mult=0.0,
        bias_decay_mult=0.0,
        flat_decay_mult=0.0,
        custom_keys={'pos_bias': dict(decay_mult=0.0)},
    ),
    clip_grad=dict(max_norm=1.0),
)
