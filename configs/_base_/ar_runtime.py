# Autoregressive models: our own task models, so our own scope. Types of other libraries are written
# with their prefix, `mmpretrain.X`; those of mmengine need none.
default_scope = 'aft_mm'

# Registers the safe loading of checkpoints, also where a tool loads before it builds.
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
    # A run that resumes at any iteration has the bits of an uninterrupted one.
    exact_resume=dict(type='aft_mm.ExactResumeHook'),
    # Data that the model cannot take stops the run before its first iteration.
    first_sample=dict(type='aft_mm.SanityCheckHook'),
    # A non-finite loss or gradient stops the run before it reaches the weights.
    finite_loss=dict(type='aft_mm.FiniteLossHook'),
    # The log shows the loss in bits in addition to nats.
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
