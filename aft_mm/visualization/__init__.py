"""Pictures of what a model has learned."""

from .curves import draw_curves, read_scalars
from .position_bias import draw_position_bias
from .samples import draw_completions, draw_samples

__all__ = [
    'draw_completions', 'draw_curves', 'draw_position_bias', 'draw_samples', 'read_scalars'
]
