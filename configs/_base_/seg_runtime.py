# mmseg's runtime; types without a prefix are looked up in mmseg, ours are written `aft_mm.X`.
_base_ = 'mmseg::_base_/default_runtime.py'

# Registers the allow-list for safe checkpoint loading, also where a tool loads before it builds.
custom_imports = dict(imports=['aft_mm.registry'], allow_failed_imports=False)

# The interval and how many are kept are the schedule's.
default_hooks = dict(
    checkpoint=dict(type='aft_mm.SafeCheckpointHook'),
    # A non-finite loss or gradient stops the run before it reaches the weights.
    finite_loss=dict(type='aft_mm.FiniteLossHook'))
randomness = dict(seed=0, deterministic=False)
