"""Pictures of what a model has learned."""

from .curves import AXES as CURVE_AXES
from .curves import draw_curves, metric_label
from .explorer import ExplorerImage, ExplorerLayer, explorer_page
from .point_cloud import draw_point_clouds
from .position_bias import draw_position_bias
from .run_table import TABLES, run_table
from .samples import draw_completions, draw_samples
from .scalars import read_scalars, seconds_at, trained, validated_metrics, validations
from .seeds import draw_seeds, seed_table
from .super_resolution import draw_super_resolution

__all__ = [
    'CURVE_AXES',
    'ExplorerImage',
    'ExplorerLayer',
    'TABLES',
    'draw_completions',
    'draw_curves',
    'draw_point_clouds',
    'draw_position_bias',
    'draw_samples',
    'draw_seeds',
    'draw_super_resolution',
    'explorer_page',
    'metric_label',
    'read_scalars',
    'run_table',
    'seconds_at',
    'seed_table',
    'trained',
    'validated_metrics',
    'validations',
]
