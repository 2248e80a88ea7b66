"""Units of text: subwords, characters and phonemes."""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path

from aft_mm.checks import check_choice, check_path, described, refuse
from aft_mm.errors import import_from_extra


class Subwords:
    """A subword vocabulary, trained by ``aft_mm convert subwords``.

    Args:
        path: A sentencepiece model with an end-of-sentence piece.

    Attributes:
        vocab_size: Number of subwords V; tokens are 0 … V − 1.
        end: The token that ends a sentence.
        unknown_token: The token of characters without a subword.
        fingerprint: First digits of the file's SHA-256.

    Raises:
        ValueError: If the file is not such a model, or sentencepiece is missing.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        check_path('subwords', path)
        sentencepiece = import_from_extra('sentencepiece', 'text', 'subwords need')
        self.path = os.fspath(path)
        if not os.path.isfile(path):
            raise ValueError(
                f'subwords {self.path!r} does not exist; '
                '`aft_mm convert subwords` makes it of the training text'
            )
        content = Path(path).read_bytes()
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(content)
        except RuntimeError as error:
            raise ValueError(f'subwords {self.path!r} is no model of sentencepiece') from error
        self.fingerprint = hashlib.sha256(content).hexdigest()[:16]
        self.vocab_size: int = self._processor.vocab_size()
        self.end: int = self._processor.eos_id()
        self.unknown_token: int = self._processor.unk_id()
        if self.end < 0:
            raise ValueError(
                f'subwords {self.path!r} has no piece that ends a sentence; train it '
                'with `aft_mm convert subwords`'
            )

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each line, with ``end`` as the last one."""
        return [[*tokens, self.end] for tokens in self._processor.encode(list(lines))]

    def unknown(self, line: str) -> str:
        """Return the characters of a line without a subword."""
        tokens = self._processor.encode(line)
        pieces = zip(tokens, self._processor.encode(line, out_type=str), strict=True)
        characters = ''.join(piece for token, piece in pieces if token == self.unknown_token)
        return ''.join(dict.fromkeys(characters.replace('\u2581', '')))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens before the first ``end``, which is one line."""
        tokens = list(map(int, tokens))
        if self.end in tokens:
            tokens = tokens[: tokens.index(self.end)]
        # Byte tokens may be ends of lines.
        return self._processor.decode(tokens).replace('\r', ' ').replace('\n', ' ')


def split_lines(content: bytes) -> tuple[list[str], list[int]]:
    r"""Return the lines of a UTF-8 text, and the numbers (from 1) of those with invalid UTF-8.

    Lines end with \n or \r\n only, unlike those of ``splitlines``, which would misalign pairs. They
    have no byte order mark in front; joined files have several.
    """
    rows = content.split(b'\n')
    if not rows[-1]:
        rows.pop()  # after the last end of line
    lines, invalid = [], []
    for number, row in enumerate(rows, 1):
        row = row.removesuffix(b'\r')
        try:
            lines.append(row.decode('utf-8-sig'))
        except UnicodeDecodeError:
            lines.append(row.decode('utf-8-sig', errors='replace'))
            invalid.append(number)
    return lines, invalid


BLANK = '<blank>'
UNKNOWN = '<unk>'
CASES: dict[str, Callable[[str], str]] = {'keep': str, 'upper': str.upper, 'lower': str.lower}
_VARIANT = re.compile(r'\(\w+\)$')  # A(2), the second way to say A


class TextUnits:
    """Transcripts as ints and back: 0 is CTC's blank, 1 is unknown, then the symbols follow.

    Symbols are characters or, with a lexicon, phonemes.

    Args:
        symbols: Characters or phonemes, in the order of their ints.
        lexicon: Path of a dictionary in the format of CMUdict, ``WORD  P1 P2 …``; the first
            pronunciation is used. Stress digits are removed if no symbol has one.
        level: ``'word'`` for symbols that are words.
        case: ``'upper'`` or ``'lower'`` converts transcripts to the case of the symbols or lexicon.

    Raises:
        ValueError: If symbols are empty, repeated or too long, or the lexicon has an unknown
            phoneme.
    """

    def __init__(
        self,
        symbols: Sequence[str],
        lexicon: str | None = None,
        case: str = 'keep',
        level: str = 'character',
    ) -> None:
        if not isinstance(symbols, Sequence) or not all(isinstance(s, str) and s for s in symbols):
            refuse('symbols', 'a list of texts', symbols)
        symbols = tuple(symbols)
        repeated = {symbol for symbol in symbols if symbols.count(symbol) > 1}
        if not symbols or repeated:
            refuse('symbols', 'texts that differ', sorted(repeated) or symbols)
        if lexicon is not None:
            check_path('lexicon', lexicon)
            check_choice('level', level, ('character',))
        elif level != 'word' and any(len(symbol) > 1 for symbol in symbols):
            refuse(
                'symbols',
                "single characters without a lexicon and level='word'",
                [symbol for symbol in symbols if len(symbol) > 1],
            )
        check_choice('level', level, ('character', 'word'))
        check_choice('case', case, CASES)
        self.names = (BLANK, UNKNOWN, *symbols)
        self.case = CASES[case]
        self.numbers = {symbol: i for i, symbol in enumerate(self.names)}
        self.lexicon = lexicon
        self.in_words = lexicon is not None or level == 'word'

    def encode(self, text: str) -> tuple[tuple[int, ...], list[str]]:
        """Return the units of a transcript, and its unknown characters or words."""
        text = self.case(' '.join(text.split()))
        table = self.numbers if self.lexicon is None else self.words
        units: list[int] = []
        unknown: list[str] = []
        for part in text.split() if self.in_words else text:
            entry = table.get(part)
            if entry is None:
                unknown.append(part)
                entry = self.numbers[UNKNOWN]
            units += [entry] if isinstance(entry, int) else entry
        return tuple(units), unknown

    def decode(self, units: Iterable[int]) -> str:
        """Return the characters, or the phonemes or words with spaces between them."""
        return (' ' if self.in_words else '').join(self.names[unit] for unit in units)

    @cached_property
    def words(self) -> dict[str, tuple[int, ...]]:
        assert self.lexicon is not None
        stressed = any(symbol[-1].isdigit() for symbol in self.names)
        pronunciations = {}
        for word, phonemes in read_lexicon(self.lexicon).items():
            names = phonemes if stressed else [phoneme.rstrip('012') for phoneme in phonemes]
            missing = [name for name in names if name not in self.numbers]
            if missing:
                raise ValueError(
                    f'lexicon {self.lexicon!r} says {described(word)} with {described(missing[0])}, '
                    f'which is none of the {len(self.names) - 2} symbols'
                )
            pronunciations[word] = tuple(self.numbers[name] for name in names)
        return pronunciations


def read_lexicon(path: str) -> dict[str, tuple[str, ...]]:
    """Return the first pronunciation of every word of a dictionary in the format of CMUdict.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If a line has a word without phonemes, or there is no word.
    """
    check_path('lexicon', path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f'lexicon {path!r} does not exist')
    words: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(Path(path).read_bytes().split(b'\n'), 1):
        try:
            text = line.decode('utf-8-sig')
        except UnicodeDecodeError:
            text = line.decode('latin-1')
        word, *phonemes = text.partition(' # ')[0].split() or ['#']
        if word.startswith((';;;', '#')):
            continue
        if not phonemes:
            raise ValueError(
                f'line {number} of lexicon {path!r} has the word {described(word)} and no phonemes'
            )
        words.setdefault(_VARIANT.sub('', word), tuple(phonemes))
    if not words:
        raise ValueError(f'lexicon {path!r} has no word')
    return words
