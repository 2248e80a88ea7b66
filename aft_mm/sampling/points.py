"""Point clouds from an autoregressive model."""

from typing import Any

import numpy as np
from torch import nn

from aft_mm.checks import check_choice, check_int
from aft_mm.errors import UserError
from aft_mm.tokenizers import decode_points
from aft_mm.visualization.point_cloud import AXES


def check_settings(settings: Any) -> None:
    """Look at ``point_cloud`` of a config, from which points are drawn and shown.

    Raises:
        UserError: it is no dict of num_points, num_bits and up, or one is out of range.
    """
    missing = [
        name
        for name in ('num_points', 'num_bits', 'up')
        if not isinstance(settings, dict) or name not in settings
    ]
    if missing:
        raise UserError(
            'point_cloud of the config must be dict(num_points=..., num_bits=..., '
            f'up=...), but lacks {", ".join(missing)}'
        )
    check_int('num_points of point_cloud', settings['num_points'], 1)
    check_int('num_bits of point_cloud', settings['num_bits'], 1, 8)
    check_up(settings['up'])


def check_up(up: str) -> None:
    """Raise ValueError if ``up`` is none of the axes."""
    check_choice('up of a point cloud', up, AXES)


def check_points(model: nn.Module, num_bits: int, num_points: int | None = None) -> None:
    """Compare the tokens of a cloud with those that ``model`` is made for.

    Raises:
        UserError: the model has other values than the 2^num_bits of a coordinate, its length is no
            three per point, or not that of ``num_points``, or it needs a source.
    """
    length, head = model.decoder.max_length, model.head
    fits = model.encoder is None and head.token_shape == () and length % 3 == 0
    if not fits or head.num_values != 2**num_bits:
        raise UserError(
            f'a model of point clouds with num_bits={num_bits} needs {2**num_bits} values per '
            f'token, a length of 3 tokens per point and no encoder, but has {head.num_values} '
            f'values, {length} tokens and {"no" if model.encoder is None else "an"} encoder'
        )
    if num_points not in (None, length // 3):
        raise UserError(
            f"the model's position table holds {length // 3} points of 3 tokens each, "
            f'but num_points is {num_points!r}'
        )


def sample_points(model: nn.Module, num: int, num_bits: int = 8, **options: Any) -> np.ndarray:
    """Draw ``num`` clouds: float32 ``[num, P, 3]``, columns x, y, z.

    They lie in the cube of side 1 around 0, whose side stands for the longest edge of a cloud's
    bounding box; P is what the position table of the model holds. ``options`` are those of
    ``model.generate``: temperature, top_k, top_p, greedy, seed, progress.

    Raises:
        UserError: the model is made for other tokens.
        ValueError: ``num`` or an option is out of range.
    """
    check_points(model, num_bits)
    check_int('num', num, 1)
    tokens = model.generate(model.decoder.max_length, batch_size=num, **options)
    return decode_points(tokens.cpu().numpy(), num_bits).astype(np.float32)
