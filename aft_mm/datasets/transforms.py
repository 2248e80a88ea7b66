"""Pipeline steps; flips, crops and resizing come from mmcv and mmpretrain."""

import hashlib
import json
import os
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from aft_mm.checks import (
    check_choice,
    check_flag,
    check_int,
    check_path,
    check_probability,
    check_sizes,
    refuse,
)
from aft_mm.errors import UnusableFile
from aft_mm.images import read_rgb
from aft_mm.registry import TRANSFORMS
from aft_mm.structures import SequenceSample, UtteranceSample
from aft_mm.tokenizers import bounding_cube, check_num_bits, check_order, encode_points

from .file_dataset import read_arrays, write_arrays
from .point_clouds import read_points
from .sound_files import (
    filter_banks,
    num_kaldi_frames,
    num_mfc_frames,
    read_header,
    read_kaldi,
    read_mfc,
    read_sound,
    resampled,
)

if find_spec('mmcv') is not None:  # it registers the steps that configs name beside ours
    import_module('mmcv.transforms')


class Transform:
    """A step that changes the results of the one before it."""

    def __call__(self, results: dict[str, Any]) -> dict[str, Any] | None:
        return self.transform(results)

    def transform(self, results: dict[str, Any]) -> dict[str, Any] | None:
        """Return the results, or None for a sample to leave out."""
        raise NotImplementedError


@TRANSFORMS.register_module()
class LoadRGBImage(Transform):
    """Read ``results['img_path']`` into ``results['img']``, uint8 RGB [H, W, 3].

    Warnings of :func:`aft_mm.images.read_rgb` become ``results['warnings']``,
    ``{warning: file}``.
    """

    def transform(self, results: dict) -> dict:
        path = results['img_path']
        results['img'], warnings = read_rgb(path)
        if warnings:
            results['warnings'] = dict.fromkeys(warnings, path)
        return results


@TRANSFORMS.register_module()
class SuperResolutionPair(Transform):
    """The central square of an image at two sizes, ``img`` and, shrunk again by area, ``source``.

    Args:
        size: Height and width of ``img`` [px].
        scale_factor: Ratio of the two sizes; it divides ``size``.
        crop_size: Edge of the square [px], at least ``size``; by default the largest.
    """

    def __init__(self, size: int = 32, scale_factor: int = 4, crop_size: int | None = None) -> None:
        check_int('size', size, 1)
        check_int('scale_factor', scale_factor, 1)
        if size % scale_factor:
            refuse('size', f'a multiple of scale_factor={scale_factor}', size)
        if crop_size is not None:
            check_int('crop_size', crop_size, size)
        self.size = size
        self.scale_factor = scale_factor
        self.crop_size = crop_size

    def transform(self, results: dict) -> dict:
        """Replace ``img`` [H, W, C] by [size, size, C] and add ``source``, both uint8.

        Raises:
            UnusableFile: If the image is smaller than the crop or ``size``.
        """
        image = results['img']
        edge = min(image.shape[:2])
        if edge < (self.crop_size or self.size):
            raise UnusableFile(
                f'image {results.get("img_path")!r} of {image.shape[0]} x {image.shape[1]} px is '
                f'smaller than the crop of {self.crop_size or self.size} px'
            )
        image = shrink(central_square(image, self.crop_size or edge), self.size)
        results['img'] = image
        results['source'] = shrink(image, self.size // self.scale_factor)
        return results


def central_square(image: np.ndarray, edge: int) -> np.ndarray:
    top, left = ((length - edge) // 2 for length in image.shape[:2])
    return image[top : top + edge, left : left + edge]


def shrink(image: np.ndarray, size: int) -> np.ndarray:
    small = cv2.resize(image, (size, size), interpolation=cv2.INTER_AREA)
    return small.reshape(size, size, *image.shape[2:])  # cv2 drops an axis of one channel


@TRANSFORMS.register_module()
class LoadPoints(Transform):
    """Read ``results['points_path']`` into ``results['points']``, see :func:`aft_mm.datasets.read_points`."""

    def transform(self, results: dict) -> dict:
        results['points'] = read_points(results['points_path'])
        return results


@TRANSFORMS.register_module()
class PackPointCloud(Transform):
    """Sample points of a cloud and encode them as a sequence; the last step of a pipeline.

    Returns ``dict(inputs=uint8 [3·num_points], data_samples=SequenceSample(length, num_context=0,
    box))`` with the tokens of :func:`aft_mm.tokenizers.encode_points` in the cloud's bounding cube.

    Args:
        num_points: Number of points; smaller clouds are sampled with replacement and a warning.
        num_bits: Bits per coordinate, 1 to 8.
        order: See :func:`aft_mm.tokenizers.encode_points`.
        seed: An int gives a cloud the same points in every epoch; None uses numpy's global
            generator.
    """

    def __init__(
        self, num_points: int = 2048, num_bits: int = 8, order: str = 'raw', seed: int | None = None
    ) -> None:
        check_int('num_points', num_points, 1)
        check_num_bits(num_bits)
        check_order(order)
        if seed is not None:
            check_int('seed', seed, 0)
        self.num_points = num_points
        self.num_bits = num_bits
        self.order = order
        self.seed = seed

    def transform(self, results: dict) -> dict:
        points = results['points']
        short = len(points) < self.num_points
        generator = (
            np.random
            if self.seed is None
            else np.random.default_rng((self.seed, results['sample_idx']))
        )
        sampled = points[generator.choice(len(points), self.num_points, replace=short)]
        box = bounding_cube(points)
        tokens = torch.from_numpy(encode_points(sampled, self.num_bits, box, self.order))
        metainfo = dict(length=len(tokens), num_context=0, box=box)
        if short:
            message = f'a cloud of fewer than {self.num_points} points is sampled with replacement'
            metainfo['warnings'] = {message: results.get('points_path')}
        return dict(inputs=tokens, data_samples=SequenceSample(metainfo=metainfo))


@TRANSFORMS.register_module()
class RandomValueShift(Transform):
    """Add one random integer to all sub-pixels, clipped to 0..255, as both AFT papers do.

    Args:
        max_shift: Largest absolute value of the integer [grey levels].
    """

    def __init__(self, max_shift: int = 10) -> None:
        check_int('max_shift', max_shift, 0, 255)
        self.max_shift = max_shift

    def transform(self, results: dict) -> dict:
        shift = np.random.randint(-self.max_shift, self.max_shift + 1)
        image = results['img'].astype(np.int16) + shift
        results['img'] = image.clip(0, 255).astype(np.uint8)
        return results


@TRANSFORMS.register_module()
class PackSequence(Transform):
    """Flatten an image to a sequence in raster order; the last step of a pipeline.

    Returns ``dict(inputs=uint8 [T] or [T, C], data_samples=SequenceSample(length=T))``, with
    ``source`` and ``warnings`` if there are any.

    Args:
        image_shape: ``(H, W, C)`` of every image, C = 1 or 3 (RGB).
        tokens: ``'subpixels'``: T = H·W·C values, R, G, B of a pixel in turn; ``'pixels'``: T = H·W
            vectors of C values.

    Raises:
        ValueError: If an image has another shape or is not uint8.
    """

    def __init__(self, image_shape: Sequence[int], tokens: str = 'subpixels') -> None:
        check_sizes('image_shape (H, W, C)', image_shape, (3,))
        check_choice('tokens', tokens, ('subpixels', 'pixels'))
        self.image_shape = tuple(image_shape)
        self.tokens = tokens

    def transform(self, results: dict) -> dict:
        image = np.atleast_3d(results['img'])
        if image.shape != self.image_shape or image.dtype != np.uint8:
            name = repr(results['img_path']) if 'img_path' in results else results.get('sample_idx')
            raise ValueError(
                f'image{"" if name is None else f" {name}"} must be uint8 of '
                f'image_shape {self.image_shape}, got {image.dtype} of shape '
                f'{image.shape}'
            )
        tokens = self._flatten(image)
        sample = SequenceSample(metainfo=dict(length=len(tokens), num_context=0))
        if 'source' in results:
            sample.source = self._flatten(np.atleast_3d(results['source']))
        if 'warnings' in results:
            sample.set_metainfo(dict(warnings=results['warnings']))
        return dict(inputs=tokens, data_samples=sample)

    def _flatten(self, image: np.ndarray) -> torch.Tensor:
        shape = (-1,) if self.tokens == 'subpixels' else (-1, image.shape[-1])
        # torch has no negative strides, as of a flipped image.
        return torch.from_numpy(np.ascontiguousarray(image.reshape(shape)))


#: Smallest standard deviation; silence is constant.
SMALLEST_STD = 1e-5


@TRANSFORMS.register_module()
class LoadUtterance(Transform):
    """Read ``results['path']`` into ``results['features']``, float32 [T, F].

    ``a.mfc`` is read as features of Sphinx, ``a.ark:123`` as a matrix of a Kaldi archive, other
    paths as sound with :func:`filter_banks`. ``warnings`` notes changes to the sound.

    Args:
        sample_rate: Rate to which sound is resampled [Hz].
        num_mel_bins: F of filter banks.
        cache_dir: Folder for filter banks, or None.
    """

    def __init__(
        self, sample_rate: int = 16000, num_mel_bins: int = 40, cache_dir: str | None = None
    ) -> None:
        check_int('sample_rate', sample_rate, 1000)
        check_int('num_mel_bins', num_mel_bins, 4)
        if cache_dir is not None:
            check_path('cache_dir', cache_dir)
        self.sample_rate = sample_rate
        self.num_mel_bins = num_mel_bins
        self.cache_dir = cache_dir

    def num_frames(self, path: str) -> tuple[int, str]:
        """Return T from the header, and a note if the rate is another one.

        Raises:
            UnusableFile: As reading does.
        """
        if path.endswith('.mfc'):
            return num_mfc_frames(path), ''
        if is_kaldi(path):
            return num_kaldi_frames(path), ''
        frames, rate = read_header(path, self.sample_rate)
        return frames, '' if rate == self.sample_rate else resampled(rate, self.sample_rate)

    def transform(self, results: dict) -> dict:
        path = results['path']
        if path.endswith('.mfc'):
            results['features'] = read_mfc(path)
        elif is_kaldi(path):
            results['features'] = read_kaldi(path)
        else:
            results['features'], warnings = self._sound(path)
            results['warnings'] = dict.fromkeys(warnings, path)
        return results

    def _sound(self, path: str) -> tuple[np.ndarray, list[str]]:
        cached = self._cache_file(path)
        arrays = None if cached is None else read_arrays(cached, 'features', 'warnings')
        if arrays is not None:
            return arrays[0], arrays[1].tolist()
        samples, warnings = read_sound(path, self.sample_rate)
        features = filter_banks(samples, self.sample_rate, self.num_mel_bins)
        if cached is not None:
            try:
                cached.parent.mkdir(parents=True, exist_ok=True)
                write_arrays(cached, features=features, warnings=np.array(warnings, dtype=str))
            except OSError as error:
                raise ValueError(
                    f'cache_dir {str(self.cache_dir)!r} cannot be written '
                    f'({error.strerror}); name another one, or None'
                ) from error
        return features, warnings

    def _cache_file(self, path: str) -> Path | None:
        if self.cache_dir is None or not os.path.isfile(path):
            return None
        stat = os.stat(path)
        file = [os.path.abspath(path), stat.st_size, stat.st_mtime_ns]
        key = json.dumps([*file, self.sample_rate, self.num_mel_bins])
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        return Path(self.cache_dir, name[:2], f'{name}.v2.npz')


def is_kaldi(path: str) -> bool:
    return '.ark:' in path or path.rstrip().endswith('|')


@TRANSFORMS.register_module()
class NormalizeFeatures(Transform):
    """Subtract the mean of every bin and divide by its standard deviation.

    Args:
        per: ``'utterance'`` or ``'speaker'``, see :class:`Utterances`.
        joint_bins: Use one mean and standard deviation for all bins, which keeps the spectrum of a
            short word.
    """

    def __init__(self, per: str = 'utterance', joint_bins: bool = False) -> None:
        check_choice('per', per, ('utterance', 'speaker'))
        check_flag('joint_bins', joint_bins)
        if joint_bins and per == 'speaker':
            raise ValueError("per must be 'utterance' for joint_bins=True, got 'speaker'")
        self.per, self.axis = per, None if joint_bins else 0

    def transform(self, results: dict) -> dict:
        features = results['features']
        if self.per == 'utterance' or 'statistics' not in results:
            frames = features.astype(np.float64)
            mean, std = frames.mean(self.axis), frames.std(self.axis)
        else:
            mean, std = results['statistics']
        normal = (features - mean) / np.maximum(std, SMALLEST_STD)
        results['features'] = normal.astype(np.float32)
        return results


class Moments:
    """Running mean and standard deviation over frames."""

    def __init__(self) -> None:
        self.number, self.sum, self.squares = 0, np.zeros(()), np.zeros(())

    def add(self, features: np.ndarray) -> None:
        frames = features.astype(np.float64)
        self.number += len(frames)
        self.sum = self.sum + frames.sum(0)
        self.squares = self.squares + np.square(frames).sum(0)

    def mean_and_std(self) -> tuple[np.ndarray, np.ndarray]:
        mean = self.sum / self.number
        return mean, np.sqrt(np.maximum(self.squares / self.number - mean**2, 0))


@TRANSFORMS.register_module()
class SpecAugment(Transform):
    """Set random bands of bins and spans of frames to 0 (arXiv 1904.08779).

    Args:
        num_bands: Number of bands.
        band: Largest width of a band [bins], F in the paper.
        num_spans: Number of spans.
        span: Largest length of a span [frames], T in the paper.
        most: Largest share of the frames in a span, p in the paper.
    """

    def __init__(
        self,
        num_bands: int = 2,
        band: int = 8,
        num_spans: int = 2,
        span: int = 40,
        most: float = 0.2,
    ) -> None:
        for name, value in dict(
            num_bands=num_bands, band=band, num_spans=num_spans, span=span
        ).items():
            check_int(f'{name} of SpecAugment', value, 0)
        check_probability('most of SpecAugment', most)
        # axes of [T, F]
        self.masks = [(1, band, 1.0)] * num_bands + [(0, span, most)] * num_spans

    def transform(self, results: dict) -> dict:
        features = results['features'].copy()
        for axis, width, share in self.masks:
            size = features.shape[axis]
            width = width if share == 1 else min(width, int(size * share))
            if width >= 1:
                length = torch.rand(1) * width
                start = int(torch.rand(1) * (size - length))
                masked = [slice(None), slice(None)]
                masked[axis] = slice(start, start + int(length))
                features[tuple(masked)] = 0
        results['features'] = features
        return results


@TRANSFORMS.register_module()
class StackFrames(Transform):
    """Concatenate every n = `num_frames` frames, [T, F] -> [⌈T/n⌉, n·F]; the last one may be repeated."""

    def __init__(self, num_frames: int) -> None:
        check_int('num_frames of StackFrames', num_frames, 1)
        self.num_frames = num_frames

    def transform(self, results: dict) -> dict:
        features = results['features']
        rest = -len(features) % self.num_frames
        features = np.pad(features, ((0, rest), (0, 0)), mode='edge')
        results['features'] = features.reshape(len(features) // self.num_frames, -1)
        return results


@TRANSFORMS.register_module()
class PackUtterance(Transform):
    """Return ``dict(inputs=float32 [T, F], data_samples=UtteranceSample)``; the last step."""

    def transform(self, results: dict) -> dict:
        features = torch.from_numpy(np.ascontiguousarray(results['features'], dtype=np.float32))
        known = {
            name: results[name] for name in ('name', 'text', 'units', 'warnings') if name in results
        }
        sample = UtteranceSample(metainfo=dict(length=len(features), **known))
        return dict(inputs=features, data_samples=sample)
