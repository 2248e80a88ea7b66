"""Pictures of what a model has learned."""

from .alignment import draw_alignment
from .attention import (
    MeanAttention,
    draw_relative_attention,
    mean_attention_distance,
    mean_relative_attention,
)
from .bias_table import position_bias_table
from .browsing import draw_instances, draw_matrix, draw_segments, draw_text, enlarge
from .classes import (
    draw_cams,
    draw_confusion,
    draw_features,
    draw_titled_images,
    most_confident_mistakes,
)
from .curves import draw_curves, metric_label
from .explorer import ExplorerImage, ExplorerLayer, explorer_page
from .figures import choose
from .keys import draw_key_maps, key_maps
from .point_cloud import draw_point_clouds
from .position_bias import draw_position_bias
from .receptive_field import (
    draw_receptive_field,
    energy_within,
    radius_of_share,
    receptive_field,
)
from .recording import (
    RecordAttention,
    as_map,
    attention_probabilities,
    grid_of,
    mixers_with_bias,
    mixers_with_keys,
    record_outputs,
)
from .run_table import TABLES, run_table
from .samples import draw_completions, draw_header, draw_samples
from .scalars import read_scalars, seconds_at, trained, validated_metrics, validations
from .seed_curves import draw_seed_curves
from .seeds import draw_seeds, seed_table
from .super_resolution import draw_super_resolution

__all__ = [
    'ExplorerImage',
    'ExplorerLayer',
    'MeanAttention',
    'RecordAttention',
    'TABLES',
    'as_map',
    'attention_probabilities',
    'choose',
    'draw_alignment',
    'draw_cams',
    'draw_completions',
    'draw_confusion',
    'draw_curves',
    'draw_features',
    'draw_header',
    'draw_instances',
    'draw_key_maps',
    'draw_matrix',
    'draw_point_clouds',
    'draw_position_bias',
    'draw_receptive_field',
    'draw_relative_attention',
    'draw_samples',
    'draw_seed_curves',
    'draw_seeds',
    'draw_segments',
    'draw_super_resolution',
    'draw_text',
    'draw_titled_images',
    'energy_within',
    'enlarge',
    'explorer_page',
    'grid_of',
    'key_maps',
    'mean_attention_distance',
    'mean_relative_attention',
    'metric_label',
    'mixers_with_bias',
    'mixers_with_keys',
    'most_confident_mistakes',
    'position_bias_table',
    'radius_of_share',
    'read_scalars',
    'receptive_field',
    'record_outputs',
    'run_table',
    'seconds_at',
    'seed_table',
    'trained',
    'validated_metrics',
    'validations',
]
