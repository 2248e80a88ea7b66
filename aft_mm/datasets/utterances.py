"""Datasets of utterances with their transcripts: sound, and features of Kaldi and Sphinx."""

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aft_mm.checks import check_choice, check_int, check_path, described, refuse
from aft_mm.errors import UnusableFile
from aft_mm.openmmlab import warn
from aft_mm.registry import DATASETS
from aft_mm.tokenizers import TextUnits, split_lines

from .file_dataset import FileDataset
from .sound_files import CEPSTRA
from .transforms.speech import LoadUtterance, NormalizeFeatures, StackFrames

LONGEST_LINE = 2**20  # characters
LONGEST_ID = 1000  # characters
MOST_NAMED = 5  # lines or utterances per message
MANY_LENGTHS = 20  # by chance all are even once in a million times
#: Words of Sphinx that are not spoken.
MARKERS = ('<s>', '</s>', '<sil>')


def read_transcripts(path: str, kaldi: bool = False) -> tuple[dict[str, str], list[str]]:
    """Read lines of Kaldi, ``ID TEXT``, or Sphinx, ``TEXT (ID)``; return texts by id, and warnings.

    Without `kaldi`, they are of Sphinx if more than half of them end with an id of their own in
    brackets: a text of Kaldi may end in ``(laughter)``.

    Warnings list lines that are empty, an id alone, or invalid UTF-8, which becomes U+FFFD.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If it has no utterance, one twice, or a line of the other format or over a MB.
    """
    check_path('transcripts', path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f'transcripts {path!r} does not exist')
    empty, silent = [], []
    texts: dict[str, str] = {}
    lines, damaged = split_lines(Path(path).read_bytes())
    wholes = [line.lstrip() for line in lines]
    lines = [line.rstrip() for line in wholes]
    split = [None if kaldi else _sphinx_parts(line) for line in lines]
    sphinx = 2 * len({parts[0] for parts in split if parts}) > sum(map(bool, lines))
    for number, (whole, line, parts) in enumerate(zip(wholes, lines, split, strict=True), 1):
        if len(line) > LONGEST_LINE:
            raise ValueError(
                f'line {number} of transcripts {path!r} must have at most {LONGEST_LINE:,} '
                f'characters, got {len(line):,}'
            )
        if not line:
            empty.append(number)
            continue
        if not sphinx:
            # An id before a tab may have spaces.
            name, _, text = line.partition('\t' if '\t' in whole else ' ')
            name = name.rstrip()
        elif parts:
            name, text = parts
        else:
            raise ValueError(
                f'line {number} of transcripts {path!r} must end with an id in brackets, as most '
                'lines do'
            )
        if len(name) > LONGEST_ID or '\0' in name:
            raise ValueError(
                f'line {number} of transcripts {path!r} must have an id of at most {LONGEST_ID} '
                f'characters without a zero byte, got {described(name)}'
            )
        if name in texts:
            raise ValueError(
                f'line {number} of transcripts {path!r} repeats the utterance {name!r}'
            )
        texts[name] = ' '.join(w for w in text.split() if not sphinx or w not in MARKERS)
        if not texts[name]:
            silent.append(name)
    if not texts:
        raise ValueError(f'transcripts {path!r} has no utterance')
    problems: list[tuple[str, list]] = [
        ('line(s) are empty and skipped', empty),
        ('line(s) are not valid UTF-8, invalid bytes are unknown', damaged),
        ('utterance(s) have a transcript without words', silent),
    ]
    return texts, [warning_text(path, what, items) for what, items in problems if items]


def _sphinx_parts(line: str) -> tuple[str, str] | None:
    """Return id and text of ``TEXT (ID)``; a regular expression takes quadratic time."""
    start = line.rfind('(', 0, len(line) - 2)
    name = line[start + 1 : -1]
    if start < 0 or not line.endswith(')') or name.split() != [name]:
        return None
    return name, line[:start]


def warning_text(path: str, what: str, items: list) -> str:
    """Return a message such as ``'text': 2 line(s) are empty: 3, 9``."""
    return f'{str(path)!r}: {len(items)} {what}: {first_of(items)}'


def first_of(items: Sequence) -> str:
    return ', '.join(map(str, items[:MOST_NAMED])) + (', …' if len(items) > MOST_NAMED else '')


SOUND = ('.wav', '.flac', '.ogg', '.mp3', '.opus', '.aif', '.aiff', '.au', '.w64')


class Utterances(FileDataset):
    """Utterances with transcripts; a subclass finds their files in :meth:`find`.

    Training leaves out and logs files that are missing, damaged, longer than `max_frames` or too
    short for CTC. With ``test_mode=True`` they stop the run, except short ones.

    Args:
        units: Arguments of :class:`TextUnits`.
        speaker: Regular expression whose first group in the id is the speaker.
        max_frames: Largest number of frames per utterance, before stacking.
        **kwargs: See :class:`FileDataset`; the pipeline begins with :class:`LoadUtterance`.
    """

    def __init__(
        self,
        units: dict[str, Any],
        speaker: str | None = None,
        max_frames: int | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(units, dict):
            refuse('units', 'a dict of symbols and perhaps a lexicon', units)
        self.units = TextUnits(**units)
        try:
            self.speaker = None if speaker is None else re.compile(speaker)
        except (re.error, TypeError):
            refuse('speaker', 'a regular expression', speaker)
        if self.speaker is not None and not self.speaker.groups:
            refuse('speaker', 'a regular expression with a group, the name', speaker)
        if max_frames is not None:
            check_int('max_frames', max_frames, 1)
        self.max_frames = max_frames
        self.statistics: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        metainfo = dict(units=self.units.names, in_words=self.units.in_words)
        super().__init__(**{'metainfo': metainfo, **kwargs})

    @property
    def lengths(self) -> np.ndarray:
        """Frames of each utterance after stacking, int64 [N]."""
        self.full_init()
        return np.array([self.get_data_info(i)['num_frames'] for i in range(len(self))])

    def find(self) -> Iterator[tuple[str, str, str]]:
        """Yield id, path and transcript of every utterance."""
        raise NotImplementedError

    def load_data_list(self) -> list[dict]:
        notes: dict[str, list[str]] = defaultdict(list)
        unknown: dict[str, list[str]] = defaultdict(list)
        utterances, lengths = [], set()
        stacked = math.prod(step.num_frames for step in self._steps(StackFrames))
        for name, path, text in self.find():
            units, missing = self.units.encode(text)
            for part in missing:
                unknown[part].append(name)
            frames = self._usable_frames(name, path, units, stacked, notes)
            if frames is not None:
                lengths.add(frames)
                length = -(-frames // stacked)
                info = dict(name=name, path=path, text=text, units=units, num_frames=length)
                utterances.append({**info, 'speaker': self._speaker_of(name)})
        if unknown:
            notes['word(s) or character(s) have no symbol and become <unk>'] = [
                f'{part!r} ({len(names)} x, first in {names[0]})' for part, names in unknown.items()
            ]
        for what, items in notes.items():
            warn(warning_text(self.place, what, items))
        if not utterances:
            raise ValueError(f'{self.place!r} has no utterance that can be used')
        self._check_lengths(lengths, len(utterances))
        return utterances

    def _check_lengths(self, lengths: set[int], num_utterances: int) -> None:
        """Warn of files whose numbers of frames, `lengths`, are unlikely."""

    def _usable_frames(
        self, name: str, path: str, units: tuple[int, ...], stacked: int, notes: dict[str, list]
    ) -> int | None:
        """Return the number of frames in a file before stacking, None if it is left out."""
        try:
            frames, change = self._load_step().num_frames(path)
        except UnusableFile as error:
            if self.test_mode:
                raise
            notes['utterance(s) cannot be read and are left out'].append(str(error).rstrip('.'))
            return None
        if change:
            notes[f'utterance(s) have another sample rate, {change}'].append(name)
        if self.max_frames is not None and frames > self.max_frames:
            if self.test_mode:
                raise ValueError(
                    f'utterance {name!r} has {frames} frames, more than '
                    f'max_frames={self.max_frames}: cut it into shorter ones'
                )
            notes[f'utterance(s) are longer than max_frames={self.max_frames} and left out'].append(
                name
            )
            return None
        if -(-frames // stacked) >= frames_needed(units):
            return frames
        kept = 'kept, with errors' if self.test_mode else 'left out'
        notes[f'utterance(s) have fewer frames than their transcript needs and are {kept}'].append(
            name
        )
        return frames if self.test_mode else None

    def full_init(self) -> None:
        if self._fully_initialized:
            return
        super().full_init()
        if not any(step.per == 'speaker' for step in self._steps(NormalizeFeatures)):
            return
        from sklearn.preprocessing import StandardScaler  # slow

        load = self._load_step()
        scalers: dict[str, Any] = defaultdict(StandardScaler)
        for index in range(len(self)):
            info = super().get_data_info(index)
            if info['speaker'] is None:
                raise ValueError(
                    'speaker must be known of every utterance for NormalizeFeatures('
                    f"per='speaker'), but is not of {info['name']!r}"
                )
            try:
                frames = load.transform(info)['features'].astype(np.float64)
            except UnusableFile:  # reported when it is sampled
                continue
            scalers[info['speaker']].partial_fit(frames)
        self.statistics = {
            speaker: (scaler.mean_, np.sqrt(scaler.var_)) for speaker, scaler in scalers.items()
        }

    def get_data_info(self, idx: int) -> dict:
        info = super().get_data_info(idx)
        if info['speaker'] in self.statistics:
            info['statistics'] = self.statistics[info['speaker']]
        return info

    @property
    def place(self) -> str:
        return str(self.data_root)

    def _steps(self, kind: type) -> list:
        return [step for step in self.pipeline.transforms if isinstance(step, kind)]

    def _load_step(self) -> LoadUtterance:
        steps = self._steps(LoadUtterance)
        if len(steps) != 1:
            raise ValueError(f'pipeline must have one LoadUtterance, got {len(steps)}')
        return steps[0]

    def _speaker_of(self, name: str) -> str | None:
        if self.speaker is None:
            return None
        match = self.speaker.search(name)
        if match is None:
            raise ValueError(
                f'speaker {self.speaker.pattern!r} is not found in the utterance {name!r}'
            )
        return match[1]

    def _texts(self, path: Path, kaldi: bool = False) -> dict[str, str]:
        texts, warnings = read_transcripts(str(path), kaldi)
        for line in warnings:
            warn(line)
        return texts


def frames_needed(units: tuple[int, ...]) -> int:
    """Return the frames that CTC needs: one per unit, and a blank between equal ones."""
    return len(units) + sum(a == b for a, b in zip(units, units[1:], strict=False))


def _check_both(path: str, what: str, files: set[str], texts: set[str]) -> None:
    silent = sorted(files - texts)
    if silent:
        warn(warning_text(path, f'{what} have no transcript and are left out', silent))
    if not files & texts:
        raise ValueError(
            f'{path!r} has no utterance with a transcript: ids of files begin with '
            f'{sorted(files)[:1]}, of transcripts with {sorted(texts)[:1]}'
        )


@DATASETS.register_module()
class SpeechFolder(Utterances):
    """A folder of sound files (:data:`SOUND`), with subfolders, and one file of transcripts.

    An id is the name of the file, or its path in the folder, without suffix.

    Args:
        transcripts: File in the folder, see :func:`read_transcripts`.
    """

    def __init__(self, data_root: str, transcripts: str = 'text', **kwargs: Any) -> None:
        check_path('data_root', data_root)
        check_path('transcripts', transcripts)
        super().__init__(data_root=data_root, ann_file=transcripts, **kwargs)

    def find(self) -> Iterator[tuple[str, str, str]]:
        texts = self._texts(Path(self.ann_file))
        paths: dict[str, str] = {}
        for path in sorted(Path(self.data_root).rglob('*')):
            if path.suffix.lower() in SOUND:
                whole = path.relative_to(self.data_root).with_suffix('').as_posix()
                name = whole if whole in texts else path.stem
                if name in paths and name in texts:
                    raise ValueError(
                        f'utterance {name!r} must be one file, got {paths[name]!r} '
                        f'and {str(path)!r}: name their folders in the transcripts'
                    )
                paths[name] = str(path)
        _check_both(self.place, 'sound file(s)', set(paths), set(texts))
        for name, text in texts.items():
            yield name, paths.get(name, str(Path(self.data_root, f'{name}.wav'))), text


@DATASETS.register_module()
class KaldiFeatures(Utterances):
    """A data folder of Kaldi: ``feats.scp``, ``text`` and, for speakers, ``utt2spk``.

    ``feats.scp`` has lines ``ID FILE.ark:OFFSET``, relative to the folder; pipes are not run.
    """

    def __init__(self, data_root: str, **kwargs: Any) -> None:
        check_path('data_root', data_root)
        self.speakers: dict[str, str] = {}
        super().__init__(data_root=data_root, **kwargs)

    def find(self) -> Iterator[tuple[str, str, str]]:
        places = read_transcripts(str(Path(self.data_root, 'feats.scp')), kaldi=True)[0]
        texts = self._texts(Path(self.data_root, 'text'), kaldi=True)
        speakers = Path(self.data_root, 'utt2spk')
        if os.path.isfile(speakers):
            self.speakers = read_transcripts(str(speakers), kaldi=True)[0]
        _check_both(self.place, 'matrices', set(places), set(texts))
        for name, text in texts.items():
            address = places.get(name, f'{name}.ark:0')
            yield name, str(Path(self.data_root, address)), text

    def _speaker_of(self, name: str) -> str | None:
        return self.speakers.get(name) or super()._speaker_of(name)


@DATASETS.register_module()
class SphinxFeatures(Utterances):
    """Features of Sphinx, ``feat/<file id>.mfc``, with their list and transcripts.

    Frames have 13 values, which no file says; many files that all could have more are a warning.

    Args:
        fileids: File with one path below `features` per line, without suffix.
        transcription: File of transcripts; their ids are the last parts of these paths.
    """

    def __init__(
        self,
        data_root: str,
        fileids: str,
        transcription: str,
        features: str = 'feat',
        **kwargs: Any,
    ) -> None:
        for name, path in dict(
            data_root=data_root, fileids=fileids, transcription=transcription, features=features
        ).items():
            check_path(name, path)
        self.fileids = fileids
        super().__init__(
            data_root=data_root,
            ann_file=transcription,
            data_prefix=dict(features=features),
            **kwargs,
        )

    def find(self) -> Iterator[tuple[str, str, str]]:
        path = Path(self.data_root, self.fileids)
        if not os.path.isfile(path):
            raise FileNotFoundError(f'fileids {str(path)!r} does not exist')
        ids = path.read_text(encoding='utf-8-sig', errors='surrogateescape').split()
        files: dict[str, str] = {}
        for fileid in ids:
            name = fileid.rpartition('/')[2]
            if files.setdefault(name, fileid) != fileid:
                raise ValueError(
                    f'{self.fileids} must have file ids of different names, got {files[name]!r} and '
                    f'{fileid!r}'
                )
        texts = self._texts(Path(self.ann_file))
        _check_both(self.place, 'file id(s)', set(files), set(texts))
        for name, text in texts.items():
            fileid = files.get(name, name)
            yield name, str(Path(self.data_prefix['features'], f'{fileid}.mfc')), text

    def _check_lengths(self, lengths: set[int], num_utterances: int) -> None:
        times = math.gcd(*lengths)
        if times > 1 and len(lengths) >= MANY_LENGTHS:
            warn(
                f'{self.place!r} may have {CEPSTRA * times} values per frame, as the lengths of all '
                f'{num_utterances} files are multiples of it; they are read as {CEPSTRA} per frame'
            )


WORDS = ('zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine')
FIRST_TRAINING = 5  # smaller ones are the official test set
RECORDINGS = dict(train=45, test=5)  # of each digit by each speaker
_NAME = re.compile(r'(\d)_(\w+)_(\d+)')


@DATASETS.register_module()
class FSDD(Utterances):
    """Spoken digits, ``recordings/{digit}_{speaker}_{index}.wav`` at 8 kHz, with their words.

    Missing recordings of a speaker are logged.

    Args:
        data_root: Folder that contains ``recordings``.
        split: ``'test'``, indices 0 to 4, or ``'train'``, all others.
        speakers: Names such as ``['jackson']``, or None for all.
        **kwargs: See :class:`Utterances`.

    Raises:
        ValueError: If an argument is out of range or a speaker has no recording.
    """

    def __init__(
        self,
        data_root: str,
        split: str = 'train',
        speakers: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        check_path('data_root', data_root)
        check_choice('split', split, ('train', 'test'))
        if speakers is not None and (
            isinstance(speakers, str)
            or not speakers
            or not all(isinstance(s, str) for s in speakers)
        ):
            refuse('speakers', 'a list of names', speakers)
        self.split = split
        self.speakers = speakers
        super().__init__(data_root=data_root, **kwargs)

    def find(self) -> Iterator[tuple[str, str, str]]:
        recordings = []
        for path in sorted(Path(self.data_root, 'recordings').glob('*.wav')):
            match = _NAME.fullmatch(path.stem)
            if match and (int(match[3]) >= FIRST_TRAINING) == (self.split == 'train'):
                recordings.append((match[2], path, WORDS[int(match[1])]))
        if not recordings:
            raise ValueError(
                f'{self.data_root!r} must have recordings/DIGIT_SPEAKER_NUMBER.wav of the '
                f'{self.split} split, got none'
            )
        names = {name for name, _, _ in recordings}
        chosen = names if self.speakers is None else set(self.speakers)
        if not chosen <= names:
            refuse('speakers', f'of {", ".join(sorted(names))}', self.speakers)
        recordings = [item for item in recordings if item[0] in chosen]
        whole = RECORDINGS[self.split] * len(WORDS) * len(chosen)
        if len(recordings) < whole:
            warn(
                f'{self.data_root!r} is incomplete: its {self.split} split has {len(recordings)} of '
                f'{whole} recordings of {", ".join(sorted(chosen))}'
            )
        for _, path, word in recordings:
            yield path.stem, str(path), word
