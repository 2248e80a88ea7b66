# mmseg's runtime; types without a prefix are looked up in mmseg, ours are written `aft_mm.X`.
_base_ = 'mmseg::_base_/default_runtime.py'

# Registers the allow-list for safe checkpoint loading, also where a tool loads before it builds.
custom_imports = dict(imports=['aft_mm.registry'], allow_failed_imports=False)

randomness = dict(seed=0, deterministic=False)
