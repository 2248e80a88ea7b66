"""Samples of a model and pictures of them, and of its position bias."""

from .alignment import draw_alignment
from .figures import choose
from .images import (
    check_image_shape,
    check_super_resolution,
    complete_images,
    draw_completions,
    draw_header,
    draw_samples,
    draw_super_resolution,
    given_rows,
    sample_images,
    super_resolve,
)
from .point_clouds import check_points, check_settings, check_up, draw_point_clouds, sample_points
from .position_bias import draw_position_bias, mixers_with_bias

__all__ = [
    'check_image_shape',
    'check_points',
    'check_settings',
    'check_super_resolution',
    'check_up',
    'choose',
    'complete_images',
    'draw_alignment',
    'draw_completions',
    'draw_header',
    'draw_point_clouds',
    'draw_position_bias',
    'draw_samples',
    'draw_super_resolution',
    'given_rows',
    'mixers_with_bias',
    'sample_images',
    'sample_points',
    'super_resolve',
]
