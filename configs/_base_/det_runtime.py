# mmdet's runtime; types without a prefix are looked up in mmdet, ours are written `aft_mm.X`.
_base_ = 'mmdet::_base_/default_runtime.py'

# Registers the allow-list for safe checkpoint loading, also where a tool loads before it builds.
custom_imports = dict(imports=['aft_mm.registry'], allow_failed_imports=False)

default_hooks = dict(logger=dict(interval=10), checkpoint=dict(max_keep_ckpts=3))
randomness = dict(seed=0, deterministic=False)
