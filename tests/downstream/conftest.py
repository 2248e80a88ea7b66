"""Import the registry of aft_mm, which replaces the extension that mmdet and mmseg need."""

import aft_mm.registry  # noqa: F401
