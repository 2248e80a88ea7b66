"""A module per command of ``aft_mm``, imported when its arguments are known."""
