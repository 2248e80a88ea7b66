# mmdet's runtime; types without a prefix are looked up in mmdet, ours are written `aft_mm.X`.
_base_ = 'mmdet::_base_/default_runtime.py'

# Registers the safe loading of checkpoints.
custom_imports = dict(imports=['aft_mm.registry'], allow_failed_imports=False)

default_hooks = dict(
    logger=dict(interval=10),
    checkpoint=dict(type='aft_mm.SafeCheckpointHook', max_keep_ckpts=3, save_best='auto'),
    minutes=dict(type='aft_mm.PeriodicCheckpointHook', minutes=5),
    exact_resume=dict(type='aft_mm.ExactResumeHook'),
    finite_loss=dict(type='aft_mm.FiniteLossHook'),
)
vis_backends = [dict(type='LocalVisBackend'), dict(type='TensorboardVisBackend')]
visualizer = dict(vis_backends=vis_backends)
randomness = dict(seed=0, deterministic=False)
