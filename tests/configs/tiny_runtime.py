# Three epochs, whose losses and checkpoints the hooks of recording_hooks.py record or end.
default_scope = 'aft_mm'
custom_imports = dict(imports=['aft_mm.registry', 'recording_hooks'], allow_failed_imports=False)

train_cfg = dict(by_epoch=True, max_epochs=3, val_interval=1)
val_cfg = dict()
test_cfg = dict()
default_hooks = dict(
    logger=dict(type='LoggerHook', interval=2),
    param_scheduler=dict(type='ParamSchedulerHook'),
    checkpoint=dict(type='aft_mm.SafeCheckpointHook', interval=1),
    sampler_seed=dict(type='DistSamplerSeedHook'),
    exact_resume=dict(type='aft_mm.ExactResumeHook'),
    losses=dict(type='RecordLossHook'),
    kill=dict(type='KillHook'),
)
vis_backends = [dict(type='LocalVisBackend')]
visualizer = dict(type='Visualizer', vis_backends=vis_backends)
randomness = dict(seed=0)
