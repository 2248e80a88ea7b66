# Our own task models, so our own scope; types of other libraries have a prefix, `mmpretrain.X`.
default_scope = 'aft_mm'

# Registers the safe loading of checkpoints.
custom_imports = dict(imports=['aft_mm.registry'], allow_failed_imports=False)

default_hooks = dict(
    timer=dict(type='IterTimerHook'),
    logger=dict(type='LoggerHook', interval=50),
    param_scheduler=dict(type='ParamSchedulerHook'),
    checkpoint=dict(
        type='aft_mm.SafeCheckpointHook', interval=1, max_keep_ckpts=3, save_best='auto'
    ),
    # A run that is killed loses five minutes, however long an epoch is.
    minutes=dict(type='aft_mm.PeriodicCheckpointHook', minutes=5),
    sampler_seed=dict(type='DistSamplerSeedHook'),
    exact_resume=dict(type='aft_mm.ExactResumeHook'),
    first_sample=dict(type='aft_mm.SanityCheckHook'),
    finite_loss=dict(type='aft_mm.FiniteLossHook'),
    loss_unit=dict(type='aft_mm.BitsPerDimHook'),
)

env_cfg = dict(
    cudnn_benchmark=False,
    mp_cfg=dict(mp_start_method='fork', opencv_num_threads=0),
    dist_cfg=dict(backend='nccl'),
)

vis_backends = [dict(type='LocalVisBackend'), dict(type='TensorboardVisBackend')]
visualizer = dict(type='Visualizer', vis_backends=vis_backends)

log_level = 'INFO'
load_from = None
resume = False
randomness = dict(seed=0, deterministic=False)
