"""Pictures of what a model has learned."""

from .position_bias import draw_position_bias

__all__ = ['draw_position_bias']
