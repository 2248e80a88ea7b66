from .aft_vit import AFTViT

__all__ = ['AFTViT']
