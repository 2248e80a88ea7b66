import os
from typing import Any

import numpy as np

from aft_mm.errors import UserError
from aft_mm.visualization import check_points, check_settings, sample_points

from .loading import ConfigSource, Device, FilePath, check_options, load_model


class PointCloudGenerator:
    """Sample point clouds, coordinate by coordinate.

    Args:
        config: Config with ``point_cloud = dict(num_points=..., num_bits=..., up=...)``, or its
            path.

    Raises:
        UserError: As for :func:`load_model`, or ``point_cloud`` does not match the model.
    """

    def __init__(self, config: ConfigSource, checkpoint: FilePath, device: Device = None) -> None:
        self.config, self.model = load_model(config, checkpoint, device, 'PointCloudGenerator')
        settings = self.config.point_cloud
        check_settings(settings)
        check_points(self.model, settings.num_bits, settings.num_points)
        self.num_bits = settings.num_bits

    def sample(self, num: int = 1, **options: Any) -> np.ndarray:
        """Sample clouds.

        Args:
            **options: Those of :func:`aft_mm.models.generate`.

        Returns:
            float32 ``[num, P, 3]``, x, y, z in the cube of side 1 around 0.
        """
        check_options(options)
        return sample_points(self.model, num, self.num_bits, **{'progress': True, **options})


def write_ply(path: FilePath, points: np.ndarray) -> None:
    """Write a cloud ``[P, 3]`` as a binary PLY file.

    Raises:
        UserError: ``points`` has another shape or is empty, or ``path`` does not end in .ply.
    """
    shape = np.shape(points)
    if len(shape) != 2 or shape[1] != 3 or not shape[0]:
        raise UserError(f'points must be one cloud [P, 3], got {list(shape)}')
    if os.path.splitext(path)[1] != '.ply':
        raise UserError(f'path must be a file name that ends in .ply, got {str(path)!r}')
    header = f'format binary_little_endian 1.0\nelement vertex {len(points)}'
    header += ''.join(f'\nproperty float {axis}' for axis in 'xyz')
    with open(path, 'wb') as file:
        file.write(f'ply\n{header}\nend_header\n'.encode())
        file.write(np.asarray(points, '<f4').tobytes())
