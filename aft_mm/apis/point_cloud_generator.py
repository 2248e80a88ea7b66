"""Point clouds from a trained model."""

import os
from typing import Any

import numpy as np
import torch
from mmengine.config import Config

from aft_mm.errors import UserError
from aft_mm.sampling.points import check_points, check_settings, sample_points

from .loading import load_model


class PointCloudGenerator:
    """Draw point clouds, coordinate by coordinate.

    ::

        generator = PointCloudGenerator('config.py', 'epoch_200.pth')
        clouds = generator.sample(4, seed=0)
        write_ply('chair.ply', clouds[0])

    Args:
        config: Path of a config with ``point_cloud = dict(num_points=..., num_bits=..., up=...)``,
            or the config itself.
        checkpoint: Path or http address of a checkpoint that ``tools/train.py`` wrote.
        device: Where to compute; by default an accelerator if there is one.

    Raises:
        UserError: a file does not exist, the checkpoint is of another model, or the config is
            none of point clouds, or of others than its model draws.
    """

    def __init__(
        self,
        config: str | os.PathLike | Config,
        checkpoint: str | os.PathLike,
        device: str | torch.device | None = None,
    ) -> None:
        self.config, self.model = load_model(config, checkpoint, device, 'PointCloudGenerator')
        settings = self.config.point_cloud
        check_settings(settings)
        check_points(self.model, settings.num_bits, settings.num_points)
        self.num_bits = settings.num_bits

    def sample(self, num: int = 1, **options: Any) -> np.ndarray:
        """Draw clouds: float32 ``[num, P, 3]``, columns x, y, z, in the cube of side 1 around 0.

        Args:
            num: How many.
            **options: Those of ``AutoregressiveModel.generate``: ``temperature``, ``top_k``,
                ``top_p``, ``greedy``, ``seed`` and ``progress``, which is on unless said
                otherwise.

        Raises:
            ValueError: ``num`` is below 1.
            ValueError: An option is out of range.
        """
        return sample_points(self.model, num, self.num_bits, **{'progress': True, **options})


def write_ply(path: str | os.PathLike, points: np.ndarray) -> None:
    """Write a cloud ``[P, 3]`` as a binary PLY file; trimesh knows the format.

    Raises:
        UserError: ``points`` has another shape or is empty, or ``path`` does not end in .ply.
    """
    shape = np.shape(points)
    if len(shape) != 2 or shape[1] != 3 or not shape[0]:
        raise UserError(f'write_ply needs the points of one cloud, [P, 3], got {list(shape)}')
    if os.path.splitext(path)[1] != '.ply':
        raise UserError(f'the path of write_ply must end in .ply, got {str(path)!r}')
    import trimesh  # late: nothing else that is drawn needs it

    trimesh.PointCloud(points).export(os.fspath(path), file_type='ply')
