"""Reading speech: filter banks of sound files, and features that Kaldi and Sphinx computed."""

import os
import re
import struct
from pathlib import Path

import numpy as np
import torch

from .file_dataset import UnusableFile, reason_of

WINDOW = 0.025  # seconds
SHIFT = 0.010
FULL_SCALE = 2.0**15  # Kaldi's samples are 16-bit integers
CEPSTRA = 13  # per frame in Sphinx's files
_ADDRESS = re.compile(r'([^|]+\.ark):(\d+)')
# Header of each kind of binary matrix: offsets of the numbers of rows and columns, and the bytes per
# value. A byte precedes each number in plain matrices, two floats precede both in compressed ones.
_MATRICES = {
    b'\0BFM ': (6, 11, 4),
    b'\0BDM ': (6, 11, 8),
    b'\0BCM ': (13, 17, 1),
    b'\0BCM2 ': (14, 18, 2),
    b'\0BCM3 ': (14, 18, 1),
}


def read_sound(path: str, sample_rate: int) -> tuple[np.ndarray, list[str]]:
    """Read a sound file as mono at `sample_rate` [Hz].

    libsndfile reads WAV, FLAC, OGG and more. Channels are averaged, other rates are resampled.

    Returns:
        The samples, float32 [N] within ±1, and warnings on how they were changed.

    Raises:
        UnusableFile: If the file is missing, damaged or without sound.
    """
    import soundfile

    warnings = []
    try:
        samples, rate = soundfile.read(path, dtype='float32', always_2d=True)
    except (OSError, RuntimeError) as error:
        reason = reason_of(error) if Path(path).is_file() else 'it does not exist'
        raise UnusableFile(f'sound file {path!r} cannot be read: {reason}') from error
    if not len(samples):
        raise UnusableFile(f'sound file {path!r} has no samples')
    if not np.isfinite(samples).all():
        raise UnusableFile(f'sound file {path!r} has samples that are not finite')
    if samples.shape[1] > 1:
        warnings.append(f'{samples.shape[1]} channels are averaged')
    mono = samples.mean(1)
    if rate != sample_rate:
        from torchaudio.functional import resample

        warnings.append(f'{rate} Hz are resampled to {sample_rate} Hz')
        mono = resample(torch.from_numpy(mono), rate, sample_rate).numpy()
    if not mono.any():
        warnings.append('a sound file is silent')
    return mono, warnings


def filter_banks(samples: np.ndarray, sample_rate: int, num_mel_bins: int = 40) -> np.ndarray:
    """Compute Kaldi's log mel filter banks, float32 [T, num_mel_bins], of samples [N] within ±1.

    Windows of 25 ms every 10 ms, ``T = 1 + ⌊(N − window) / shift⌋``, no dither. Sound shorter than
    a window is padded with zeros to one frame.
    """
    from torchaudio.compliance import kaldi

    window = round(WINDOW * sample_rate)
    samples = np.pad(samples, (0, max(0, window - len(samples))))
    wave = torch.from_numpy(samples)[None] * FULL_SCALE
    return kaldi.fbank(
        wave,
        num_mel_bins=num_mel_bins,
        sample_frequency=sample_rate,
        dither=0.0,
        frame_length=1000 * WINDOW,
        frame_shift=1000 * SHIFT,
    ).numpy()


def num_sound_frames(path: str, sample_rate: int) -> int:
    """Return the number of frames of :func:`filter_banks` for a file, from its header.

    Raises:
        UnusableFile: If the file is missing, damaged or without sound.
    """
    import soundfile

    try:
        info = soundfile.info(path)
    except (OSError, RuntimeError) as error:
        reason = reason_of(error) if Path(path).is_file() else 'it does not exist'
        raise UnusableFile(f'sound file {path!r} cannot be read: {reason}') from error
    if not info.frames:
        raise UnusableFile(f'sound file {path!r} has no samples')
    # The length after resampling.
    samples = -(-info.frames * sample_rate // info.samplerate)
    window, shift = round(WINDOW * sample_rate), round(SHIFT * sample_rate)
    return 1 + max(0, samples - window) // shift


def read_mfc(path: str, num_cepstra: int = CEPSTRA) -> np.ndarray:
    """Read features of Sphinx, float32 [T, num_cepstra], of either byte order.

    Raises:
        UnusableFile: If the file is missing, its size differs from its first number, or a value is
            not finite.
    """
    num_mfc_frames(path, num_cepstra)
    data = Path(path).read_bytes()
    order = '>' if struct.unpack('>i', data[:4])[0] * 4 + 4 == len(data) else '<'
    features = np.frombuffer(data, f'{order}f4', offset=4).astype(np.float32)
    if not np.isfinite(features).all():
        raise UnusableFile(f'feature file {path!r} has values that are not finite')
    return features.reshape(-1, num_cepstra)


def num_mfc_frames(path: str, num_cepstra: int = CEPSTRA) -> int:
    """Return the frames of a Sphinx file, from its header; raises as :func:`read_mfc`."""
    try:
        size = Path(path).stat().st_size
        with Path(path).open('rb') as file:
            head = file.read(4)
    except OSError as error:
        raise UnusableFile(f'feature file {path!r} cannot be read: {reason_of(error)}') from error
    counts = [struct.unpack(f'{order}i', head)[0] for order in '><'] if len(head) == 4 else []
    if size - 4 not in [4 * count for count in counts] or size <= 4:
        raise UnusableFile(
            f'feature file {path!r} is damaged: its {size} bytes do not match its first number'
        )
    if (size - 4) % (4 * num_cepstra):
        raise UnusableFile(f'feature file {path!r} must have {num_cepstra} values per frame')
    return (size - 4) // (4 * num_cepstra)


def read_kaldi(address: str) -> np.ndarray:
    """Read a matrix of a binary Kaldi archive, ``feats.ark:1234``, as float32 [T, F].

    Raises:
        UnusableFile: If it is missing, damaged, not finite or not a matrix. Commands and pickles in
            an archive are not run.
    """
    # The only maintained reader of archives with a permissive licence.
    from kaldi_native_io import FloatMatrix

    num_kaldi_frames(address)
    try:
        features = np.array(FloatMatrix.read(address))
    except RuntimeError as error:
        raise UnusableFile(f'{address!r} of a Kaldi archive is damaged') from error
    if not np.isfinite(features).all():
        raise UnusableFile(f'{address!r} of a Kaldi archive has values that are not finite')
    return features


def num_kaldi_frames(address: str) -> int:
    """Return the rows of a matrix of an archive, from its header; raises as :func:`read_kaldi`."""
    match = _ADDRESS.fullmatch(address)
    if not match:
        raise UnusableFile(f'{address!r} must be FILE.ark:OFFSET, a place in a Kaldi archive')
    try:
        with open(match[1], 'rb') as file:
            file.seek(int(match[2]))
            head = file.read(24)
            left = os.fstat(file.fileno()).st_size - int(match[2])
    except (OSError, OverflowError) as error:
        raise UnusableFile(
            f'{address!r} of a Kaldi archive cannot be read: {reason_of(error)}'
        ) from error
    for kind, (place_of_rows, place_of_columns, size) in _MATRICES.items():
        if head.startswith(kind) and len(head) >= place_of_columns + 4:
            rows, columns = (
                struct.unpack_from('<i', head, place)[0]
                for place in (place_of_rows, place_of_columns)
            )
            # The reader would allocate memory before it notices that the file is too short.
            if rows > 0 and columns > 0 and rows * columns * size < left:
                return rows
    raise UnusableFile(f'{address!r} of a Kaldi archive is not a complete matrix')
