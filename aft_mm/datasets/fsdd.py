"""The Free Spoken Digit Dataset."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aft_mm.checks import check_choice, check_path
from aft_mm.registry import DATASETS

from .utterances import Utterances

WORDS = ('zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine')
FIRST_TRAINING = 5  # index per speaker and digit; smaller ones are the official test set
_NAME = re.compile(r'(\d)_\w+_(\d+)')


@DATASETS.register_module()
class FSDD(Utterances):
    """Spoken digits, ``recordings/{digit}_{speaker}_{index}.wav`` at 8 kHz, with their words.

    Args:
        data_root: Folder that contains ``recordings``.
        split: ``'test'``, the official one (indices 0 to 4), or ``'train'``, all others.
        **kwargs: See :class:`Utterances`.
    """

    def __init__(self, data_root: str, split: str = 'train', **kwargs: Any) -> None:
        check_path('data_root', data_root)
        check_choice('split', split, ('train', 'test'))
        self.split = split
        super().__init__(data_root=data_root, **kwargs)

    def find(self) -> Iterator[tuple[str, str, str]]:
        """See :class:`Utterances`."""
        for path in sorted(Path(self.data_root, 'recordings').glob('*.wav')):
            match = _NAME.fullmatch(path.stem)
            if match and (int(match[2]) >= FIRST_TRAINING) == (self.split == 'train'):
                yield path.stem, str(path), WORDS[int(match[1])]
