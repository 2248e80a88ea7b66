"""Task models."""

from .autoregressive_model import AutoregressiveModel

__all__ = ['AutoregressiveModel']
