"""Reading speech: sound files, and features of Kaldi and Sphinx."""

import functools
import math
import re
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aft_mm.checks import check_regular
from aft_mm.errors import UnusableFile, quoted, reason_of

WINDOW = 0.025  # seconds
SHIFT = 0.010
FULL_SCALE = 2.0**15  # Kaldi's samples are 16-bit integers
EMPHASIS = 0.97
LOWEST = 20.0  # of the filters [Hz]
CEPSTRA = 13  # per frame in Sphinx's files
RATES = 1000, 384_000  # lowest and highest of a sound file [Hz]
MAX_SAMPLES = 2**26  # per channel: 70 minutes at 16 kHz
MAX_SAMPLE = 2.0**15  # of 16-bit integers that are stored as floats
MAX_FACTOR = 2**16  # of a resampler, whose filter has 20 times as many taps
UNKNOWN_LENGTH = 2**63 - 1  # libsndfile's for streamed FLAC
# libsndfile shortens a cut file silently, but logs the sizes, as `data : 6914 (should be 3435)`. A wrong
# size of the whole RIFF file loses no sound.
_SIZES = re.compile(
    r'^ *(?:data|riff|Riff size|SSND|BODY|Data Size) *: (\d+) \(should be (\d+)\)$', re.M
)
_NIST_COUNT = re.compile(rb'\nsample_count -i (\d{1,18})\n')
LEAST_STREAM = 2**31 - 2**16  # sizes in headers of streams, written before their length is known
_BLOCK = 2**20  # samples decoded at once
_FRAMES = 2**14  # frames computed at once
_ADDRESS = re.compile(r'([^|]+\.ark):([0-9]{1,18})')
# Binary matrices: offsets of rows and columns, and bytes per value.
_MATRICES = {
    b'\0BFM ': (6, 11, 4),
    b'\0BDM ': (6, 11, 8),
    b'\0BCM ': (13, 17, 1),
    b'\0BCM2 ': (14, 18, 2),
    b'\0BCM3 ': (14, 18, 1),
}


def read_sound(path: str, sample_rate: int) -> tuple[np.ndarray, list[str]]:
    """Read a sound file as mono at `sample_rate` [Hz] with libsndfile; channels are averaged.

    Returns:
        The samples, float32 [N] within ±1, and warnings about changes.

    Raises:
        UnusableFile: If the file is missing, damaged, silent or longer than :data:`MAX_SAMPLES`, or
            its rate is out of range.
    """
    read_header(path, sample_rate)
    parts, warnings = [], []
    with _opened(path) as file:
        announced, rate = file.frames, file.samplerate
        if file.channels > 1:
            warnings.append(f'{file.channels} channels are averaged')
        for block in _blocks(path, file):
            if not np.isfinite(block).all():
                raise _unusable(path, 'has samples that are not finite')
            if np.abs(block).max(initial=0) > MAX_SAMPLE:
                largest = np.abs(block).max()
                raise _unusable(path, f'must have samples within ±1, got {largest:.3g}')
            parts.append(block.mean(1))
    mono = np.concatenate(parts)
    if announced not in (UNKNOWN_LENGTH, len(mono)):
        raise _unusable(path, f'is damaged: {announced} samples announced, {len(mono)} found')
    if rate != sample_rate:
        from scipy.signal import resample_poly  # slow

        warnings.append(resampled(rate, sample_rate))
        divisor = math.gcd(rate, sample_rate)
        factors = sample_rate // divisor, rate // divisor
        mono = resample_poly(mono, *factors, window=('kaiser', 8.0))  # ripples of 4e-5
    if not mono.any():
        warnings.append('a sound file is silent')
    return mono, warnings


def _unusable(path: str, complaint: str) -> UnusableFile:
    return UnusableFile(f'sound file {quoted(path)} {complaint}')


def _opened(path: str) -> Any:
    import soundfile  # slow, and optional

    class Stream(soundfile.SoundFile):
        """Read from beginning to end, as some FLAC files cannot be searched."""

        def seekable(self) -> bool:
            return False

    try:
        check_regular(path)
        file = Stream(path)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise _unusable(path, f'cannot be read: {reason_of(error)}') from error
    sizes = [(int(announced), int(found)) for announced, found in _SIZES.findall(file.extra_info)]
    unit = 'bytes'
    if file.format == 'NIST':
        unit = 'samples'
        with open(path, 'rb') as content:
            counts = _NIST_COUNT.findall(content.read(1024))
        sizes = [(int(count), file.frames) for count in counts]
    for announced, found in sizes:
        if found + 1 < announced < LEAST_STREAM:  # one byte may be for padding
            file.close()
            raise _unusable(path, f'is damaged: {announced} {unit} announced, {found} found')
    return file


def _blocks(path: str, file: Any) -> Iterator[np.ndarray]:
    block = np.empty((max(1, _BLOCK // file.channels), file.channels), np.float32)
    num_samples = 0
    while True:
        try:
            count = len(file.read(out=block))
        except (OSError, RuntimeError) as error:
            raise _unusable(path, f'cannot be read: {reason_of(error)}') from error
        num_samples += count
        if num_samples > MAX_SAMPLES:
            raise _unusable(path, f'has more than {MAX_SAMPLES:,} samples')
        if count:
            yield block[:count]
        if count < len(block):
            break
    if not num_samples:
        raise _unusable(path, 'has no samples')


@functools.cache
def _mel_filters(sample_rate: int, num_points: int, num_mel_bins: int) -> Tensor:
    """Triangles at equal distances of ``mel(f) = 1127 ln(1 + f / 700)`` [num_points / 2 + 1, bins]."""

    def mel(frequency: Tensor) -> Tensor:
        return 1127 * torch.log1p(frequency / 700)

    low, high = mel(torch.tensor([LOWEST, sample_rate / 2], dtype=torch.float64))
    step = (high - low) / (num_mel_bins + 1)
    centre = low + step * torch.arange(1, num_mel_bins + 1)
    points = sample_rate / num_points * torch.arange(num_points // 2 + 1, dtype=torch.float64)
    distance = (mel(points)[:, None] - centre).abs() / step
    filters = (1 - distance).clamp(min=0)
    filters[-1] = 0  # Kaldi leaves out half the sample rate
    return filters.float()


def filter_banks(samples: np.ndarray, sample_rate: int, num_mel_bins: int = 40) -> np.ndarray:
    """Compute Kaldi's log mel filter banks, float32 [T, num_mel_bins], of samples [N] within ±1.

    Frames of 25 ms every 10 ms, ``T = 1 + ⌊(N − frame) / shift⌋``, without their mean, ``x_t − 0.97
    x_{t−1}``, times a Hann window to the power 0.85, no dither. Energies are those of triangles
    from 20 Hz to half the sample rate.
    """
    size, shift = int(WINDOW * sample_rate), int(SHIFT * sample_rate)
    samples = np.pad(samples, (0, max(0, size - len(samples))))
    frames = torch.from_numpy(samples * np.float32(FULL_SCALE)).unfold(0, size, shift)
    num_points = 2 ** (size - 1).bit_length()
    window = torch.hann_window(size, periodic=False) ** 0.85
    filters = _mel_filters(sample_rate, num_points, num_mel_bins)
    parts = []
    for part in frames.split(_FRAMES):  # a frame takes ten times the memory of its samples
        part = part - part.mean(1, keepdim=True)
        emphasised = part.clone()
        emphasised[:, 1:] -= EMPHASIS * part[:, :-1]
        emphasised[:, 0] *= 1 - EMPHASIS
        spectrum = torch.view_as_real(torch.fft.rfft(emphasised.mul_(window), num_points))
        energies = spectrum.square_().sum(-1) @ filters
        parts.append(energies.clamp(min=torch.finfo(torch.float32).eps).log())
    return torch.cat(parts).numpy()


def resampled(rate: int, sample_rate: int) -> str:
    return f'{rate} Hz are resampled to {sample_rate} Hz'


def read_header(path: str, sample_rate: int) -> tuple[int, int]:
    """Return the frames of :func:`filter_banks` and the rate of the file [Hz]; raises as reading."""
    with _opened(path) as file:
        rate, frames = file.samplerate, file.frames
        low, high = RATES
        if not low <= rate <= high:
            raise _unusable(path, f'must have {low} to {high} samples per second, got {rate}')
        if frames == UNKNOWN_LENGTH:
            frames = sum(map(len, _blocks(path, file)))
    if frames <= 0:
        raise _unusable(path, 'has no samples')
    samples = -(-frames * sample_rate // rate)  # after resampling
    if max(frames, samples) > MAX_SAMPLES:
        raise _unusable(
            path,
            f'must have at most {MAX_SAMPLES:,} samples, also at {sample_rate} Hz, got {frames:,} '
            f'at {rate} Hz',
        )
    divisor = math.gcd(rate, sample_rate)
    if rate != sample_rate and max(rate, sample_rate) // divisor > MAX_FACTOR:
        raise _unusable(
            path,
            f'has {rate} samples per second, which cannot be resampled to {sample_rate}: their '
            f'largest common divisor is {divisor}',
        )
    window, shift = int(WINDOW * sample_rate), int(SHIFT * sample_rate)
    return 1 + max(0, samples - window) // shift, rate


def read_mfc(path: str) -> np.ndarray:
    """Read features of Sphinx, float32 [T, 13], of either byte order.

    The file does not say how many values a frame has: 39 would become three frames of 13.

    Raises:
        UnusableFile: If the file is missing, damaged or not finite.
    """
    num_mfc_frames(path)
    with open(path, 'rb') as file:
        data = file.read()
    order = '>' if struct.unpack('>i', data[:4])[0] * 4 + 4 == len(data) else '<'
    features = np.frombuffer(data, f'{order}f4', offset=4).astype(np.float32)
    if not np.isfinite(features).all():
        raise UnusableFile(f'feature file {quoted(path)} has values that are not finite')
    return features.reshape(-1, CEPSTRA)


def num_mfc_frames(path: str) -> int:
    try:
        size = check_regular(path)
        with open(path, 'rb') as file:
            head = file.read(4)
    except OSError as error:
        raise UnusableFile(
            f'feature file {quoted(path)} cannot be read: {reason_of(error)}'
        ) from error
    counts = [struct.unpack(f'{order}i', head)[0] for order in '><'] if len(head) == 4 else []
    if size - 4 not in [4 * count for count in counts] or size <= 4:
        raise UnusableFile(
            f'feature file {quoted(path)} is damaged: its {size} bytes do not match its first number'
        )
    if (size - 4) % (4 * CEPSTRA):
        raise UnusableFile(f'feature file {quoted(path)} must have {CEPSTRA} values per frame')
    return (size - 4) // (4 * CEPSTRA)


def read_kaldi(address: str) -> np.ndarray:
    """Read a matrix of a binary Kaldi archive, ``feats.ark:1234``, as float32 [T, F].

    Raises:
        UnusableFile: If it is missing, damaged, not finite or not a matrix.
    """
    from kaldi_native_io import FloatMatrix

    num_kaldi_frames(address)
    try:
        features = np.array(FloatMatrix.read(address))
    except RuntimeError as error:
        raise UnusableFile(f'{quoted(address)} of a Kaldi archive is damaged') from error
    if not np.isfinite(features).all():
        raise UnusableFile(f'{quoted(address)} of a Kaldi archive has values that are not finite')
    return features


def num_kaldi_frames(address: str) -> int:
    match = _ADDRESS.fullmatch(address)
    if not match:
        raise UnusableFile(f'{quoted(address)} must be FILE.ark:OFFSET, a place in a Kaldi archive')
    try:
        left = check_regular(match[1]) - int(match[2])
        with open(match[1], 'rb') as file:
            file.seek(int(match[2]))
            head = file.read(24)
    except OSError as error:
        raise UnusableFile(
            f'{quoted(address)} of a Kaldi archive cannot be read: {reason_of(error)}'
        ) from error
    for kind, (place_of_rows, place_of_columns, size) in _MATRICES.items():
        if head.startswith(kind) and len(head) >= place_of_columns + 4:
            rows, columns = (
                struct.unpack_from('<i', head, offset)[0]
                for offset in (place_of_rows, place_of_columns)
            )
            # The reader would first allocate memory.
            if rows > 0 and columns > 0 and rows * columns * size < left:
                return rows
    raise UnusableFile(f'{quoted(address)} of a Kaldi archive is not a complete matrix')
