import argparse
import bz2
import gzip
import html
import io
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aft_mm.errors import UserError, user_errors
from aft_mm.outputs import write_whole
from aft_mm.packed import MAX_RATIO
from aft_mm.progress import progress

LANGUAGES = ('en', 'de')
# File names of the parts of each split; {} is the language. The two sides of an .sgm differ.
PARTS = {
    'train': (
        r'europarl-v7\.de-en\.{}',
        r'commoncrawl\.de-en\.{}',
        r'news-commentary-v\d+\.de-en\.{}',
    ),
    'val': (r'newstest2013\.{}',),
    'test': (r'newstest2014-deen-(?:src|ref)\.{}\.sgm',),
}
SEGMENT = re.compile(rb'<seg[^<>]*>', re.IGNORECASE)
END_OF_SEGMENT = re.compile(rb'</seg>', re.IGNORECASE)


def text_of(content: bytes, name: str) -> bytes:
    if name.endswith('.sgm'):
        parts = [SEGMENT.split(part, 1) for part in END_OF_SEGMENT.split(content)[:-1]]
        rows = [html.unescape(part[1].decode()) for part in parts if len(part) == 2]
        return ''.join(f'{" ".join(row.split())}\n' for row in rows).encode()
    return content if content.endswith(b'\n') or not content else content + b'\n'


class Bounded(io.RawIOBase):
    def __init__(self, file: Any, most: int) -> None:
        self.file = file
        self.left = most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self.file.readinto(buffer)
        self.left -= count
        if self.left < 0:
            raise OSError(f'it expands to more than {MAX_RATIO} times its size')
        return count


@contextmanager
def open_archive(path: Path) -> Iterator[tarfile.TarFile]:
    with path.open('rb') as file:
        head = file.read(3)
    opened: Callable[..., Any]
    opened = gzip.open if head[:2] == b'\x1f\x8b' else bz2.open if head == b'BZh' else open
    with (
        opened(path, 'rb') as packed,
        tarfile.open(
            fileobj=Bounded(packed, MAX_RATIO * path.stat().st_size + 2**20), mode='r|'
        ) as archive,
    ):
        yield archive


def read(archives: Sequence[Path]) -> dict[tuple[str, str, str], bytes]:
    texts: dict[tuple[str, str, str], bytes] = {}
    for path in progress(archives, 'archives'):
        if not path.is_file():
            raise UserError(f'archive {str(path)!r} does not exist')
        try:
            with open_archive(path) as archive:
                for member in archive:
                    if member.issparse():  # its zeros are not in the archive
                        raise ValueError(f'{member.name:.100} is a sparse file')
                    keys = keys_of(Path(member.name).name) if member.isfile() else []
                    file = archive.extractfile(member) if keys else None
                    content = b'' if file is None else file.read()
                    for key in keys:
                        texts.setdefault(key, text_of(content, member.name))
        except (
            *(tarfile.TarError, EOFError, OSError, zlib.error),
            *(ValueError, OverflowError, RecursionError),  # of tarfile, for damaged headers
        ) as error:
            reason = ' '.join(str(error).split())
            raise UserError(f'archive {str(path)!r} is damaged: {reason:.200}') from error
    return texts


def keys_of(name: str) -> list[tuple[str, str, str]]:
    return [
        (split, part, language)
        for split, parts in PARTS.items()
        for part in parts
        for language in LANGUAGES
        if re.fullmatch(part.format(language), name)
    ]


def write(texts: dict[tuple[str, str, str], bytes], folder: Path) -> None:
    for split, parts in PARTS.items():
        for part in parts:
            lines = [
                texts[split, part, language].count(b'\n')
                if (split, part, language) in texts
                else None
                for language in LANGUAGES
            ]
            if None in lines:
                shown = part.format('*').replace('\\', '').replace('d+', '*')
                raise UserError(
                    f'the archives must hold {shown} in both languages for the {split} set, but '
                    'do not'
                )
            if lines[0] != lines[1]:
                raise UserError(
                    f'{part.format("*")} must have as many lines in both languages, got '
                    f'{lines[0]:,} in English and {lines[1]:,} in German'
                )
    folder.mkdir(parents=True, exist_ok=True)
    for split, parts in PARTS.items():
        for language in LANGUAGES:
            with write_whole(folder / f'{split}.{language}') as file:
                file.writelines(texts[split, part, language] for part in parts)
        size = sum(texts[split, part, LANGUAGES[0]].count(b'\n') for part in parts)
        print(f'wrote {size:,} pairs to {folder / split}.{{{",".join(LANGUAGES)}}}')


def run(args: argparse.Namespace) -> None:
    with user_errors(OSError):
        write(read(args.archives), args.out)
