"""Tests that need mmdet and mmseg: `make downstream`."""
