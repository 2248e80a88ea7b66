"""Reading files of transcripts, one utterance per line."""

import re
from pathlib import Path
from typing import NamedTuple

from aft_mm.checks import check_path

_SPHINX = re.compile(r'(.*)\((\S+)\)')


class Transcripts(NamedTuple):
    """Texts by the id of the utterance, and warnings about the file."""

    texts: dict[str, str]
    warnings: list[str]


def read_transcripts(path: str) -> Transcripts:
    """Read lines of Kaldi, ``ID TEXT``, or Sphinx, ``TEXT (ID)``; the first line decides.

    Empty lines are skipped. A line with an id only is an utterance without words. Bytes that are
    not valid UTF-8 become U+FFFD. Remarks list all of these lines.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If it has no utterance, one of them twice, or a line of the other format.
    """
    check_path('transcripts', path)
    if not Path(path).is_file():
        raise FileNotFoundError(f'transcripts {path!r} does not exist')
    empty, damaged, silent = [], [], []
    texts: dict[str, str] = {}
    sphinx = None
    for number, raw in enumerate(Path(path).read_bytes().removesuffix(b'\n').split(b'\n'), 1):
        line = raw.decode('utf-8-sig', errors='replace').strip()
        if not line:
            empty.append(number)
            continue
        if '\ufffd' in line:
            damaged.append(number)
        match = _SPHINX.fullmatch(line)
        sphinx = bool(match) if sphinx is None else sphinx
        if sphinx and not match:
            raise ValueError(
                f'line {number} of transcripts {path!r} must end with an id in brackets, as the '
                'first line does'
            )
        name, text = (match[2], match[1]) if match and sphinx else line.partition(' ')[::2]
        if '\t' in name:
            name, _, text = line.partition('\t')
        if name in texts:
            raise ValueError(
                f'line {number} of transcripts {path!r} repeats the utterance {name!r}'
            )
        texts[name] = _without_markers(text) if sphinx else ' '.join(text.split())
        if not texts[name]:
            silent.append(name)
    if not texts:
        raise ValueError(f'transcripts {path!r} has no utterance')
    found = [
        ('line(s) are empty and skipped', empty),
        ('line(s) are not valid UTF-8, invalid bytes are unknown', damaged),
        ('utterance(s) have a transcript without words', silent),
    ]
    warnings = [warning_text(path, what, items) for what, items in found if items]
    return Transcripts(texts, warnings)


def warning_text(path: str, what: str, items: list) -> str:
    """Return a message such as ``'text': 2 line(s) are empty: 3, 9``, with at most five items."""
    shown = ', '.join(map(str, items[:5])) + (', …' if len(items) > 5 else '')
    return f'{str(path)!r}: {len(items)} {what}: {shown}'


def _without_markers(text: str) -> str:
    """Return a Sphinx transcript without ``<s>``, ``</s>`` and ``<sil>``."""
    return ' '.join(word for word in text.split() if word not in ('<s>', '</s>', '<sil>'))
