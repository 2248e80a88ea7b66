"""The former name of the readers of :mod:`aft_mm.images`."""

from aft_mm.images import read_image, read_rgb

__all__ = ['read_image', 'read_rgb']
