"""Pictures of what a model has learned."""

from .curves import draw_curves, read_scalars
from .point_cloud import draw_point_clouds
from .position_bias import draw_position_bias
from .samples import draw_completions, draw_samples
from .seed_curves import draw_seed_curves
from .seeds import draw_seeds, seed_table
from .super_resolution import draw_super_resolution

__all__ = [
    'draw_completions',
    'draw_curves',
    'draw_point_clouds',
    'draw_position_bias',
    'draw_samples',
    'draw_seed_curves',
    'draw_seeds',
    'draw_super_resolution',
    'read_scalars',
    'seed_table',
]
