"""Pipeline steps for speech."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import torch

from aft_mm.checks import check_choice, check_flag, check_int, check_path, check_probability
from aft_mm.registry import TRANSFORMS
from aft_mm.structures import UtteranceSample

from ..file_dataset import read_arrays, write_arrays
from ..sound_files import (
    filter_banks,
    num_kaldi_frames,
    num_mfc_frames,
    read_header,
    read_kaldi,
    read_mfc,
    read_sound,
    resampled,
)
from .base import Transform

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


@TRANSFORMS.register_module()
class SpecAugment(Transform):
    """Set random bands of bins and spans of frames to 0 (arXiv 1904.08779).

    All bands together leave some bins, and all spans some frames: of n, none is wider than 1 / n.

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
        bands = [(1, band, 1 / max(num_bands, 1))] * num_bands
        self.masks = bands + [(0, span, min(most, 1 / max(num_spans, 1)))] * num_spans

    def transform(self, results: dict) -> dict:
        features = results['features'].copy()
        for axis, width, share in self.masks:
            size = features.shape[axis]
            width = min(width, int(size * share))
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
