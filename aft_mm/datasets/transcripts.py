"""Files of transcripts, one utterance a line."""

import re
from pathlib import Path
from typing import NamedTuple

from aft_mm.checks import check_path

_SPHINX = re.compile(r'(.*)\((\S+)\)')


class Transcripts(NamedTuple):
    """Texts by the id of the utterance, and what there is to say about the file."""

    texts: dict[str, str]
    remarks: list[str]


def read_transcripts(path: str) -> Transcripts:
    """Read ``ID TEXT`` of Kaldi, or ``TEXT (ID)`` of Sphinx, whichever the first line is.

    An empty line is passed over. A line with nothing but an id is an utterance without a word. A
    line that is no UTF-8 keeps what can be read of it, the rest becomes U+FFFD. Each is said in a
    remark.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It has no utterance, one of them twice, or a line of the other format.
    """
    check_path('transcripts', path)
    if not Path(path).is_file():
        raise FileNotFoundError(f'transcripts {path!r} does not exist.')
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
                f'line {number} of transcripts {path!r} has no id in brackets at its '
                'end, as the first line has.'
            )
        name, text = (match[2], match[1]) if match and sphinx else line.partition(' ')[::2]
        if '\t' in name:
            name, _, text = line.partition('\t')
        if name in texts:
            raise ValueError(
                f'line {number} of transcripts {path!r} has the utterance {name!r} '
                'for a second time.'
            )
        texts[name] = _without_markers(text) if sphinx else ' '.join(text.split())
        if not texts[name]:
            silent.append(name)
    if not texts:
        raise ValueError(f'transcripts {path!r} has no utterance.')
    sentences = [
        ('line(s) are empty and passed over', empty),
        ('line(s) are no UTF-8, what cannot be read of them is unknown', damaged),
        ('utterance(s) have a transcript without a word', silent),
    ]
    remarks = [said(path, what, items) for what, items in sentences if items]
    return Transcripts(texts, remarks)


def said(path: str, what: str, items: list) -> str:
    """``'text': 2 line(s) are empty: 3, 9``, with five items at most."""
    shown = ', '.join(map(str, items[:5])) + (', …' if len(items) > 5 else '')
    return f'{str(path)!r}: {len(items)} {what}: {shown}'


def _without_markers(text: str) -> str:
    """A Sphinx transcript without ``<s>``, ``</s>`` and ``<sil>``."""
    return ' '.join(word for word in text.split() if word not in ('<s>', '</s>', '<sil>'))
