"""Pictures of what a model has learned."""

from .alignment import draw_alignment
from .curves import draw_curves, read_scalars
from .point_cloud import draw_point_clouds
from .position_bias import draw_position_bias
from .samples import draw_completions, draw_samples
from .seeds import draw_seeds, seed_table
from .super_resolution import draw_super_resolution

__all__ = [
    'draw_alignment',
    'draw_completions',
    'draw_curves',
    'draw_point_clouds',
    'draw_position_bias',
    'draw_samples',
    'draw_seeds',
    'draw_super_resolution',
    'read_scalars',
    'seed_table',
]
