"""Extract WMT14 English-German from the archives of statmt.org for aft_mm.ParallelText.

    python tools/dataset_converters/wmt14.py training-parallel-europarl-v7.tgz \\
        training-parallel-commoncrawl.tgz training-parallel-nc-v9.tgz dev.tgz test-full.tgz \\
        --out data/wmt14_en_de

The result is train.en and train.de (Europarl v7, Common Crawl and News Commentary, about 4.5
million pairs), val.* (newstest2013) and test.* (newstest2014 of test-full.tgz), raw text with one
sentence per line. The order of the archives does not matter. Nothing is downloaded.
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
SEGMENT = re.compile(rb'<seg[^>]*>(.*?)</seg>', re.DOTALL | re.IGNORECASE)


def text_of(content: bytes, name: str) -> bytes:
    """Return the lines of a member, without .sgm markup and with a final newline."""
    if name.endswith('.sgm'):
        rows = [html.unescape(row.decode()) for row in SEGMENT.findall(content)]
        return ''.join(f'{" ".join(row.split())}\n' for row in rows).encode()
    return content if content.endswith(b'\n') or not content else content + b'\n'


def read(archives: Sequence[Path]) -> dict[tuple[str, str, str], bytes]:
    """Read the text of the parts in the archives by split, pattern of the part and language.

    Raises:
        UserError: An archive is missing or damaged.
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
    """Return the (split, part, language) of a file name, if any."""
    return [
        (split, part, language)
        for split, parts in PARTS.items()
        for part in parts
        for language in LANGUAGES
        if re.fullmatch(part.format(language), name)
    ]


def write(found: dict[tuple[str, str, str], bytes], folder: Path) -> None:
    """Write the files of all splits atomically.

    Raises:
        UserError: A part is missing, or its languages differ in the number of lines.
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
            target, partial = folder / f'{split}.{language}', folder / f'{split}.{language}.part'
            with partial.open('wb') as file:
                file.writelines(found[split, part, language] for part in parts)
            os.replace(partial, target)
        size = sum(found[split, part, LANGUAGES[0]].count(b'\n') for part in parts)
        print(f'wrote {size:,} pairs to {folder / split}.{{{",".join(LANGUAGES)}}}')


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('archives', type=Path, nargs='+', help='the .tgz files')
    parser.add_argument(
        '--out',
        type=Path,
        default=Path('data/wmt14_en_de'),
        metavar='FOLDER',
        help='output folder; default %(default)s',
    )
    args = parser.parse_args(argv)
    with user_errors(OSError):
        write(read(args.archives), args.out)


if __name__ == '__main__':
    main()
