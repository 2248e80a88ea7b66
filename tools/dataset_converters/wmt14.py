"""Lay out WMT14 English-German, of the archives of statmt.org, for aft_mm.ParallelText.

    python tools/dataset_converters/wmt14.py training-parallel-europarl-v7.tgz \
        training-parallel-commoncrawl.tgz training-parallel-nc-v9.tgz dev.tgz test-full.tgz \
        --out data/wmt14_en_de

The result is train.en and train.de (Europarl v7, Common Crawl and News Commentary, about 4.5
million pairs), val.* (newstest2013) and test.* (newstest2014, as test-full.tgz has it), raw text of
one sentence a line. Nothing is downloaded; the archives may stand in any order.
"""

import argparse
import html
import os
import re
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from aft_mm.cli.progress import progress
from aft_mm.errors import UserError, user_errors

LANGUAGES = ('en', 'de')
# Of each split, the parts that make it; {} is the language, and the two sides of an .sgm differ.
PARTS = {
    'train': (
        r'europarl-v7\.de-en\.{}',
        r'commoncrawl\.de-en\.{}',
        r'news-commentary-v\d+\.de-en\.{}',
    ),
    'val': (r'newstest2013\.{}',),
    'test': (r'newstest2014-deen-(?:src|ref)\.{}\.sgm',),
}
SEGMENT = re.compile(rb'<seg[^>]*>(.*?)</seg>', re.DOTALL | re.IGNORECASE)


def text_of(content: bytes, name: str) -> bytes:
    """The lines of a member, those of an .sgm without the markup; the last ends as the others."""
    if name.endswith('.sgm'):
        rows = [html.unescape(row.decode()) for row in SEGMENT.findall(content)]
        return ''.join(f'{" ".join(row.split())}\n' for row in rows).encode()
    return content if content.endswith(b'\n') or not content else content + b'\n'


def read(archives: Sequence[Path]) -> dict[tuple[str, str, str], bytes]:
    """The text of each part that the archives hold, by split, pattern of the part and language.

    Raises:
        UserError: an archive is missing or damaged.
    """
    found = {}
    for path in progress(archives, 'archives'):
        if not path.is_file():
            raise UserError(f'archive {str(path)!r} does not exist')
        try:
            with tarfile.open(path) as archive:
                for member in archive:
                    for key in keys_of(Path(member.name).name) if member.isfile() else ():
                        content = archive.extractfile(member).read()
                        found.setdefault(key, text_of(content, member.name))
        except (tarfile.TarError, EOFError, OSError, zlib.error, UnicodeDecodeError) as error:
            raise UserError(f'archive {str(path)!r} is damaged: {error}') from error
    return found


def keys_of(name: str) -> list[tuple[str, str, str]]:
    """Which part in which language a file of an archive is, if any."""
    return [
        (split, part, language)
        for split, parts in PARTS.items()
        for part in parts
        for language in LANGUAGES
        if re.fullmatch(part.format(language), name)
    ]


def write(found: dict[tuple[str, str, str], bytes], folder: Path) -> None:
    """Write the files of all splits, whole or not at all.

    Raises:
        UserError: a part is missing, or its sides differ in their numbers of lines.
    """
    for split, parts in PARTS.items():
        for part in parts:
            lines = [
                found[split, part, language].count(b'\n')
                if (split, part, language) in found
                else None
                for language in LANGUAGES
            ]
            if None in lines:
                shown = part.format('*').replace('\\', '').replace('d+', '*')
                raise UserError(
                    f'no archive holds {shown} in both languages, which is a part of '
                    f'the {split} set'
                )
            if lines[0] != lines[1]:
                raise UserError(
                    f'{part.format("*")} has {lines[0]:,} lines in English and '
                    f'{lines[1]:,} in German'
                )
    folder.mkdir(parents=True, exist_ok=True)
    for split, parts in PARTS.items():
        for language in LANGUAGES:
            target, partial = folder / f'{split}.{language}', folder / f'{split}.{language}.part'
            with partial.open('wb') as file:
                file.writelines(found[split, part, language] for part in parts)
            os.replace(partial, target)
        size = sum(found[split, part, LANGUAGES[0]].count(b'\n') for part in parts)
        print(f'{size:,} pairs written to {folder / split}.{{{",".join(LANGUAGES)}}}')


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('archives', type=Path, nargs='+', help='the .tgz files')
    parser.add_argument('--out', type=Path, default=Path('data/wmt14_en_de'), metavar='FOLDER')
    args = parser.parse_args(argv)
    with user_errors(OSError):
        write(read(args.archives), args.out)


if __name__ == '__main__':
    main()
