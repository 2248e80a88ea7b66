"""Attention Free Transformer for mmengine and mmpretrain."""

__version__ = '0.1.0'
