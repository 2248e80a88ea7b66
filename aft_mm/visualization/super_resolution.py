"""What a super-resolution model made of its inputs."""

from collections.abc import Mapping

import numpy as np

from aft_mm.structures import enlarge_bicubic

from .samples import draw_header, draw_samples, enlarging


def draw_super_resolution(
    inputs: np.ndarray,
    samples: np.ndarray | Mapping[str, np.ndarray],
    targets: np.ndarray | None = None,
) -> np.ndarray:
    """One row per input: the input, its bicubic upscaling, the samples and the original.

    Of several models their samples stand side by side.

    The pictures are enlarged by a whole factor, without smoothing, until they are at least 96
    pixels wide; every column has its name above it.

    Args:
        inputs: uint8 ``[N, h, w, C]``, C = 1 or 3 (RGB).
        samples: uint8 ``[N, K, H, W, C]``, K samples of each, H / h = W / w a whole number; or
            the name of a model to such.
        targets: uint8 ``[N, H, W, C]``, the images that the inputs were made of; None leaves the
            column out.

    Returns:
        uint8 ``[H', W', 3]``.

    Raises:
        ValueError: The shapes do not fit each other, or as in :func:`draw_samples`.
    """
    inputs = np.asarray(inputs)
    models = samples if isinstance(samples, Mapping) else {'sample': samples}
    if not models:
        raise ValueError('samples must hold those of at least one model, but it is empty.')
    drawn = {name: np.asarray(array) for name, array in models.items()}
    factors = {_factor(inputs, array) for array in drawn.values()}
    if len(factors) > 1:
        raise ValueError(
            'samples of several models must have one size, got those of '
            f'{sorted(factors)} times the input.'
        )
    factor = factors.pop()
    samples = np.concatenate(list(drawn.values()), axis=1)
    image_shape = samples.shape[2:]
    targets = (
        np.empty((len(inputs), 0, *image_shape), np.uint8)
        if targets is None
        else (np.asarray(targets)[:, None])
    )
    if targets.shape != (len(inputs), targets.shape[1], *image_shape):
        raise ValueError(
            f'targets must be [N, H, W, C] of samples {list(samples.shape)}, got '
            f'{[len(targets), *targets.shape[2:]]}.'
        )
    large = inputs.repeat(factor, axis=1).repeat(factor, axis=2)
    smooth = np.stack([enlarge_bicubic(image, image_shape[:2]) for image in inputs])
    rows = np.concatenate([large[:, None], smooth[:, None], samples, targets], axis=1)
    grid = draw_samples(
        rows.reshape(-1, *image_shape), columns=rows.shape[1], scale=enlarging(image_shape[1])
    )
    names = [
        f'input {inputs.shape[1]}x{inputs.shape[2]}',
        'bicubic',
        *(
            f'{name} {i + 1}' if array.shape[1] > 1 else name
            for name, array in drawn.items()
            for i in range(array.shape[1])
        ),
        *['original'] * targets.shape[1],
    ]
    return np.concatenate([draw_header(names, grid.shape[1]), grid])


def _factor(inputs: np.ndarray, samples: np.ndarray) -> int:
    """By what the samples are larger than the inputs."""
    if inputs.ndim == 4 and samples.ndim == 5 and len(inputs) == len(samples):
        factor = samples.shape[2] // max(1, inputs.shape[1])
        size = tuple(factor * edge for edge in inputs.shape[1:3])
        if factor and samples.shape[2:] == (*size, inputs.shape[3]):
            return factor
    raise ValueError(
        'samples must be [N, K, H, W, C] with H and W the same multiple of those of '
        f'inputs {list(inputs.shape)}, got {list(samples.shape)}.'
    )
