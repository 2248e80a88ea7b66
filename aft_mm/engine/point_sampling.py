"""Point clouds from an autoregressive model."""

from typing import Any

import numpy as np
from torch import nn

from aft_mm.structures import decode_points

from .errors import UserError


def check_points(model: nn.Module, num_bits: int) -> None:
    """Compare the tokens of a cloud with those that ``model`` is made for.

    Raises:
        UserError: the model has other values than the 2^num_bits of a coordinate, its length is no
            three per point, or it needs a source.
    """
    length, head = model.decoder.max_length, model.head
    fits = model.encoder is None and head.token_shape == () and length % 3 == 0
    if not fits or head.num_values != 2**num_bits:
        raise UserError(
            f'a model of point clouds with num_bits={num_bits} needs {2**num_bits} values per '
            f'token, a length of 3 tokens per point and no encoder, but has {head.num_values} '
            f'values, {length} tokens and {"no" if model.encoder is None else "an"} encoder')


def sample_points(model: nn.Module, num: int, num_bits: int = 8, **options: Any) -> np.ndarray:
    """Draw ``num`` clouds: float32 ``[num, P, 3]``, columns x, y, z.

    They lie in the cube of side 1 around 0, whose side stands for the longest edge of a cloud's
    bounding box; P is what the position table of the model holds. ``options`` are those of
    ``model.generate``: temperature, top_k, top_p, greedy, seed, progress.

    Raises:
        UserError: the model is made for other tokens, or ``num`` is below 1.
        ValueError: An option is out of range.
    """
    check_points(model, num_bits)
    if not (isinstance(num, int) and num >= 1):
        raise UserError(f'num must be an int, at least 1, but got {num!r}')
    tokens = model.generate(model.decoder.max_length, batch_size=num, **options)
    return decode_points(tokens.cpu().numpy(), num_bits).astype(np.float32)
