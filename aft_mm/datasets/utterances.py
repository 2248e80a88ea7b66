"""Datasets of utterances: sound, and features of Kaldi and Sphinx."""

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from aft_mm.checks import check_int, check_path, refuse
from aft_mm.errors import UnusableFile
from aft_mm.openmmlab import warn
from aft_mm.registry import DATASETS
from aft_mm.tokenizers import TextUnits

from .file_dataset import FileDataset
from .transcripts import Transcripts, read_transcripts, warning_text
from .transforms.speech import LoadUtterance, Moments, NormalizeFeatures, StackFrames

SOUND = ('.wav', '.flac', '.ogg')


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
        utterances = []
        for name, path, text in self.find():
            units, missing = self.units.encode(text)
            for part in missing:
                unknown[part].append(name)
            length = self._usable_length(name, path, units, notes)
            if length is not None:
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
        return utterances

    def _usable_length(
        self, name: str, path: str, units: tuple[int, ...], notes: dict[str, list]
    ) -> int | None:
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
        length = -(-frames // prod(step.num_frames for step in self._steps(StackFrames)))
        if length >= frames_needed(units):
            return length
        kept = 'kept, with errors' if self.test_mode else 'left out'
        notes[f'utterance(s) have fewer frames than their transcript needs and are {kept}'].append(
            name
        )
        return length if self.test_mode else None

    def full_init(self) -> None:
        if self._fully_initialized:
            return
        super().full_init()
        if not any(step.per == 'speaker' for step in self._steps(NormalizeFeatures)):
            return
        load = self._load_step()
        sums: dict[str, Moments] = defaultdict(Moments)
        for index in range(len(self)):
            info = super().get_data_info(index)
            if info['speaker'] is None:
                raise ValueError(
                    'speaker must be known of every utterance for NormalizeFeatures('
                    f"per='speaker'), but is not of {info['name']!r}"
                )
            try:
                sums[info['speaker']].add(load.transform(info)['features'])
            except UnusableFile:  # reported when it is sampled
                continue
        self.statistics = {speaker: parts.mean_and_std() for speaker, parts in sums.items()}

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

    def _texts(self, path: Path) -> dict[str, str]:
        transcripts: Transcripts = read_transcripts(str(path))
        for line in transcripts.warnings:
            warn(line)
        return transcripts.texts


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
    """A folder of WAV, FLAC or OGG files, with subfolders, and one file of transcripts.

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

    ``feats.scp`` has lines ``ID FILE.ark:OFFSET``; pipes are not run.

    Args:
        archive_root: Folder of relative archives; by default `data_root`.
    """

    def __init__(self, data_root: str, archive_root: str | None = None, **kwargs: Any) -> None:
        check_path('data_root', data_root)
        if archive_root is not None:
            check_path('archive_root', archive_root)
        self.archive_root = archive_root or data_root
        self.speakers: dict[str, str] = {}
        super().__init__(data_root=data_root, **kwargs)

    def find(self) -> Iterator[tuple[str, str, str]]:
        places = read_transcripts(str(Path(self.data_root, 'feats.scp'))).texts
        texts = self._texts(Path(self.data_root, 'text'))
        speakers = Path(self.data_root, 'utt2spk')
        if os.path.isfile(speakers):
            self.speakers = read_transcripts(str(speakers)).texts
        _check_both(self.place, 'matrices', set(places), set(texts))
        for name, text in texts.items():
            address = places.get(name, f'{name}.ark:0')
            yield name, str(Path(self.archive_root, address)), text

    def _speaker_of(self, name: str) -> str | None:
        return self.speakers.get(name) or super()._speaker_of(name)


@DATASETS.register_module()
class SphinxFeatures(Utterances):
    """Features of Sphinx, ``feat/<file id>.mfc``, with their list and transcripts.

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
