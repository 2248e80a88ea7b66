"""Necks: what heads read, made of the outputs of a backbone."""

from .layer_concat import LayerConcat
from .simple_feature_pyramid import SimpleFeaturePyramid

__all__ = ['LayerConcat', 'SimpleFeaturePyramid']
