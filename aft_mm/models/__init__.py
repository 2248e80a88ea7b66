"""Models: what a config of the host libraries builds by name."""

from .backbones import AFTViT

__all__ = ['AFTViT']
