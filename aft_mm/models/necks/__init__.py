"""Necks: feature maps for dense heads from those of a backbone."""

from .simple_feature_pyramid import SimpleFeaturePyramid

__all__ = ['SimpleFeaturePyramid']
