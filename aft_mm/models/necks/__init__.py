"""Necks: from the maps of a backbone to those that a dense head reads."""

from .simple_feature_pyramid import SimpleFeaturePyramid

__all__ = ['SimpleFeaturePyramid']
