# Types without a prefix are looked up in mmpretrain, ours are written `aft_mm.X`.
default_scope = 'mmpretrain'

# Registers the safe loading of checkpoints.
custom_imports = dict(imports=['aft_mm.registry'], allow_failed_imports=False)

default_hooks = dict(
    timer=dict(type='IterTimerHook'),
    logger=dict(type='LoggerHook', interval=100),
    param_scheduler=dict(type='ParamSchedulerHook'),
    checkpoint=dict(
        type='aft_mm.SafeCheckpointHook', interval=1, max_keep_ckpts=3, save_best='auto'
    ),
    minutes=dict(type='aft_mm.PeriodicCheckpointHook', minutes=5),
    sampler_seed=dict(type='DistSamplerSeedHook'),
    exact_resume=dict(type='aft_mm.ExactResumeHook'),
    check_images=dict(type='aft_mm.CheckImagesHook'),
    finite_loss=dict(type='aft_mm.FiniteLossHook'),
    visualization=dict(type='VisualizationHook', enable=False),
)

env_cfg = dict(
    cudnn_benchmark=False,
    mp_cfg=dict(mp_start_method='fork', opencv_num_threads=0),
    dist_cfg=dict(backend='nccl'),
)

vis_backends = [dict(type='LocalVisBackend'), dict(type='TensorboardVisBackend')]
visualizer = dict(type='UniversalVisualizer', vis_backends=vis_backends)

log_level = 'INFO'
load_from = None
resume = False
randomness = dict(seed=0, deterministic=False)
