# mmseg's runtime; types without a prefix are looked up in mmseg, ours are written `aft_mm.X`.
_base_ = 'mmseg::_base_/default_runtime.py'

# Registers the safe loading of checkpoints.
custom_imports = dict(imports=['aft_mm.registry'], allow_failed_imports=False)

# default_hooks are the schedule's.
custom_hooks = [
    dict(type='aft_mm.FiniteLossHook'),
    dict(type='aft_mm.PeriodicCheckpointHook', minutes=5),
    dict(type='aft_mm.ExactResumeHook'),
]

vis_backends = [dict(type='LocalVisBackend'), dict(type='TensorboardVisBackend')]
visualizer = dict(vis_backends=vis_backends)
randomness = dict(seed=0, deterministic=False)
