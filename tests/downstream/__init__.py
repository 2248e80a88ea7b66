"""Tests that need mmdet, mmseg and the compiled mmcv: `make downstream`."""
