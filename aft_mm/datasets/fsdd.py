import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from aft_mm.checks import check_choice, check_path, refuse
from aft_mm.openmmlab import warn
from aft_mm.registry import DATASETS

from .utterances import Utterances

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
