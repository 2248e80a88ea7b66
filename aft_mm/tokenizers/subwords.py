import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from aft_mm.checks import check_path
from aft_mm.errors import import_from_extra


class Subwords:
    """A subword vocabulary, trained by ``aft_mm convert subwords``.

    Args:
        path: A sentencepiece model with an end-of-sentence piece.

    Attributes:
        vocab_size: Number of subwords V; tokens are 0 … V − 1.
        end: The token that ends a sentence.
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
        tokens, unknown = self._processor.encode(line), self._processor.unk_id()
        pieces = zip(tokens, self._processor.encode(line, out_type=str), strict=True)
        characters = ''.join(piece for token, piece in pieces if token == unknown)
        return ''.join(dict.fromkeys(characters.replace('\u2581', '')))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens before the first ``end``."""
        tokens = list(map(int, tokens))
        if self.end in tokens:
            tokens = tokens[: tokens.index(self.end)]
        return self._processor.decode(tokens)


def split_lines(content: bytes) -> tuple[list[str], list[int]]:
    r"""Return the lines of a UTF-8 text, and the numbers (from 1) of those with invalid UTF-8.

    Lines end with \n or \r\n only, unlike those of ``splitlines``, which would misalign pairs.
    """
    rows = content.split(b'\n')
    if not rows[-1]:
        rows.pop()  # after the last end of line
    lines, invalid = [], []
    for number, row in enumerate(rows, 1):
        row = row.removesuffix(b'\r')
        try:
            lines.append(row.decode())
        except UnicodeDecodeError:
            lines.append(row.decode(errors='replace'))
            invalid.append(number)
    return lines, invalid
