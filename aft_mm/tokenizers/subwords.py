"""Text as subwords and back."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from aft_mm.checks import check_path

__all__ = ['Subwords', 'split_lines']


class Subwords:
    """A subword vocabulary, the file that ``tools/dataset_converters/subwords.py`` trains.

    Args:
        path: A model of sentencepiece with a piece that ends a sentence.

    Attributes:
        vocab_size: Number of subwords V; tokens are 0 … V − 1.
        end: The token that ends a sentence.
        fingerprint: The first digits of the file's SHA-256; weights are for one vocabulary only.

    Raises:
        ValueError: The file does not exist or is no such model, or sentencepiece is missing, which
            the extra ``text`` installs.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        check_path('subwords', path)
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise ValueError(
                'subwords need sentencepiece, which pip install aft_mm[text] installs'
            ) from error
        self.path = os.fspath(path)
        if not Path(path).is_file():
            raise ValueError(
                f'subwords {self.path!r} does not exist; '
                'tools/dataset_converters/subwords.py makes it of the training text'
            )
        content = Path(path).read_bytes()
        self._processor = SentencePieceProcessor()
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
                'with tools/dataset_converters/subwords.py'
            )

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """The tokens of each line, ``end`` the last of them."""
        return [[*tokens, self.end] for tokens in self._processor.encode(list(lines))]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens up to the first ``end``."""
        tokens = list(map(int, tokens))
        if self.end in tokens:
            tokens = tokens[: tokens.index(self.end)]
        return self._processor.decode(tokens)


def split_lines(content: bytes) -> tuple[list[str], list[int]]:
    r"""The lines of a UTF-8 text, and the numbers, from 1 on, of those that are not valid UTF-8.

    A line ends at \n, a \r before it included, and at nothing else: text from the web holds other
    characters that Python's ``splitlines`` takes for ends, which would shift one file of a pair
    against the other. Bytes that are no text become U+FFFD.
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
