"""Files of transcripts, one utterance per line."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from aft_mm.checks import check_path, described

LONGEST_LINE = 2**20  # bytes
LONGEST_ID = 1000  # characters
MOST_NAMED = 5  # lines or utterances per message
#: Words of Sphinx that are not spoken.
MARKERS = ('<s>', '</s>', '<sil>')


class Transcripts(NamedTuple):
    texts: dict[str, str]
    warnings: list[str]


def read_transcripts(path: str) -> Transcripts:
    """Read lines of Kaldi, ``ID TEXT``, or Sphinx, ``TEXT (ID)``; the first line decides.

    Warnings list lines that are empty, an id alone, or invalid UTF-8, which becomes U+FFFD.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If it has no utterance, one twice, or a line of the other format or over a MB.
    """
    check_path('transcripts', path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f'transcripts {path!r} does not exist')
    empty, damaged, silent = [], [], []
    texts: dict[str, str] = {}
    sphinx = None
    for number, raw in enumerate(Path(path).read_bytes().removesuffix(b'\n').split(b'\n'), 1):
        if len(raw) > LONGEST_LINE:
            raise ValueError(
                f'line {number} of transcripts {path!r} must have at most {LONGEST_LINE:,} bytes, '
                f'got {len(raw):,}'
            )
        line = raw.decode('utf-8-sig', errors='replace').strip()
        if not line:
            empty.append(number)
            continue
        if '\ufffd' in line:
            damaged.append(number)
        parts = _sphinx_parts(line) if sphinx is None or sphinx else None
        sphinx = parts is not None if sphinx is None else sphinx
        if sphinx and parts is None:
            raise ValueError(
                f'line {number} of transcripts {path!r} must end with an id in brackets, as the '
                'first line does'
            )
        name, text = parts if parts else line.partition(' ')[::2]
        if '\t' in name:
            name, _, text = line.partition('\t')
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
    warnings = [warning_text(path, what, items) for what, items in problems if items]
    return Transcripts(texts, warnings)


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
