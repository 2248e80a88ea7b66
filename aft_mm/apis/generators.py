"""Images, point clouds and text from autoregressive models."""

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import torch

from aft_mm.checks import check_encodable, check_int, check_path, described
from aft_mm.errors import UserError
from aft_mm.images import read_image
from aft_mm.models.decoding import evaluating
from aft_mm.outputs import check_suffix
from aft_mm.visualization import (
    check_image_shape,
    check_points,
    check_settings,
    complete_images,
    given_rows,
    sample_images,
    sample_points,
)

from .loading import (
    Checkpoint,
    ConfigSource,
    Device,
    FilePath,
    ImageSources,
    as_list,
    check_options,
    load_model,
)


class ImageGenerator:
    """Sample and complete images, pixel by pixel.

    Both methods take the options of :func:`aft_mm.models.generate`.

    Args:
        config: Config with ``image_shape = (H, W, C)``, or its path.
    """

    def __init__(self, config: ConfigSource, checkpoint: Checkpoint, device: Device = None) -> None:
        self.config, self.model = load_model(config, checkpoint, device, 'ImageGenerator')
        self.image_shape = tuple(self.config.image_shape)
        check_image_shape(self.model, self.image_shape)

    def sample(self, num: int = 1, **options: Any) -> np.ndarray:
        """Sample images, uint8 ``[num, H, W, C]``."""
        check_options(options)
        return sample_images(self.model, self.image_shape, num, **{'progress': True, **options})

    def complete(self, images: ImageSources, keep: float = 0.5, **options: Any) -> np.ndarray:
        """Sample the lower part of images.

        Args:
            images: A list of paths, arrays or PIL images, or an array ``[N, H, W, C]``, RGB if C = 3;
                others as in :func:`aft_mm.images.rgb_of`.
            keep: Share of the upper rows that is given; at least one is given and one left.

        Returns:
            uint8 ``[N, H, W, C]``.
        """
        check_options(options)
        several = getattr(images, 'ndim', 0) == 4  # an array or tensor
        given: Any = images if several else as_list(images)
        height, width, channels = self.image_shape
        pictures = [read_image(image, channels)[0] for image in given]
        for picture in pictures:
            if picture.shape != self.image_shape:
                raise UserError(
                    f'images must be {height} x {width} pixels (height x width), got '
                    f'{picture.shape[0]} x {picture.shape[1]}'
                )
        batch = np.array(pictures, np.uint8).reshape(-1, *self.image_shape)
        rows = given_rows(keep, height)
        return complete_images(self.model, batch, rows, **{'progress': True, **options})


class PointCloudGenerator:
    """Sample point clouds, coordinate by coordinate.

    Args:
        config: Config with ``point_cloud = dict(num_points=..., num_bits=..., up=...)``, or its
            path.

    Raises:
        UserError: As for :func:`load_model`, or ``point_cloud`` does not match the model.
    """

    def __init__(self, config: ConfigSource, checkpoint: Checkpoint, device: Device = None) -> None:
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
        UserError: ``points`` has another shape, is empty or not finite, or ``path`` does not end in .ply.
    """
    check_path('path', path)
    shape = np.shape(points)
    if len(shape) != 2 or shape[1] != 3 or not shape[0]:
        raise UserError(f'points must be one cloud [P, 3], got {list(shape)}')
    with np.errstate(over='ignore'):
        cloud = np.asarray(points, '<f4')
    if not np.isfinite(cloud).all():
        raise UserError('points must be finite in float32, got NaN or infinity')
    check_suffix('path', path, ['.ply'])
    header = f'format binary_little_endian 1.0\nelement vertex {len(points)}'
    header += ''.join(f'\nproperty float {axis}' for axis in 'xyz')
    with open(path, 'wb') as file:
        file.write(f'ply\n{header}\nend_header\n'.encode())
        file.write(cloud.tobytes())


class TextGenerator:
    """Continue text and score it, byte by byte."""

    def __init__(self, config: ConfigSource, checkpoint: Checkpoint, device: Device = None) -> None:
        self.config, self.model = load_model(config, checkpoint, device, 'TextGenerator')

    @overload
    def __call__(
        self, prompt: str | None = None, num_chars: int | None = None, **options: Any
    ) -> str: ...

    @overload
    def __call__(
        self,
        prompt: list[str] | tuple[str, ...],
        num_chars: int | None = None,
        **options: Any,
    ) -> list[str]: ...

    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        num_chars: int | None = None,
        **options: Any,
    ) -> str | list[str]:
        """Continue a prompt, or each prompt of a list.

        Args:
            prompt: A text, or a list of texts of any lengths; None starts from nothing.
            num_chars: Bytes to sample, by default as many as the position table holds; invalid ones
                become U+FFFD.
            **options: Those of :func:`aft_mm.models.generate`.

        Returns:
            The prompt followed by the sampled bytes, those before the ``end_token`` if there is
            one; a list for a list of prompts.
        """
        if num_chars is not None:
            check_int('num_chars', num_chars, 1)
        options = {'progress': True, **options}
        check_options(options, ('source',))
        end = options.get('end_token')
        if prompt is None:
            return decode(self.model.generate(self._length(0, num_chars), **options)[0], 0, end)
        texts = self._texts('prompt', prompt, '; None starts from nothing')
        prompts = [torch.tensor(list(text.encode()), dtype=torch.int64) for text in texts]
        longest = max(map(len, prompts))
        length = self._length(longest, num_chars)
        tokens = self.model.generate(length, prompts=prompts, **options)
        results = [
            decode(row[: len(given) + length - longest], len(given), end)
            for row, given in zip(tokens, prompts, strict=True)
        ]
        return results[0] if isinstance(prompt, str) else results

    @torch.no_grad()
    def score(self, text: str | Sequence[str]) -> np.ndarray | list[np.ndarray]:
        """Compute ``log p(byte | previous bytes)`` of a text, or of each text of a list.

        Returns:
            float64 [bytes] in nats; a list for a list of texts.

        Raises:
            ValueError: A text is empty or not a str, or exceeds the position table.
        """
        texts = self._texts('text', text)
        device = next(self.model.parameters()).device
        scores = []
        for given in texts:
            tokens = torch.tensor([list(given.encode())], device=device)
            limit = self.model.decoder.max_length
            if tokens.shape[1] > limit:
                raise UserError(
                    f"text must be at most {limit} bytes, the model's {self.model.decoder.limited_by}, "
                    f'got {tokens.shape[1]}'
                )
            with evaluating(self.model):
                hidden = self.model.decoder(tokens)
                nats = self.model.head.nats(hidden, tokens, dtype=torch.float64)
            scores.append(-nats[0].cpu().numpy())
        return scores[0] if isinstance(text, str) else scores

    @staticmethod
    def _texts(name: str, text: str | Sequence[str], hint: str = '') -> list[str]:
        texts = as_list(text)
        if not texts or not all(isinstance(part, str) and part for part in texts):
            raise UserError(
                f'{name} must be a str of at least one character, or a list of such, '
                f'got {described(text)}{hint}'
            )
        for part in texts:
            check_encodable(name, part)
        return texts

    def _length(self, longest: int, num_chars: int | None) -> int:
        limit = self.model.decoder.max_length
        if longest + (num_chars or 1) > limit:
            wanted = 'at least 1' if num_chars is None else num_chars
            raise UserError(
                f'prompt and num_chars must be at most {limit} bytes together, the '
                f"model's {self.model.decoder.limited_by}, got {longest} and {wanted}"
            )
        return longest + num_chars if num_chars else limit


def decode(tokens: torch.Tensor, num_given: int, end: int | None) -> str:
    """Return the text of a sequence up to the first end after the given tokens."""
    values = tokens.tolist()
    if end in values[num_given:]:
        values = values[: values.index(end, num_given)]
    return bytes(values).decode(errors='replace')
