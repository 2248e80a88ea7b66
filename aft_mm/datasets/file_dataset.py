"""A dataset of many files, some of which may be damaged."""

import gzip
import lzma
import zlib
from pathlib import Path
from typing import Any

from mmengine.dataset import BaseDataset

from aft_mm.errors import UnusableFile, quoted

MAX_UNUSABLE = 20  # in a row


def read_packed(path: Path, most: int, name: str) -> bytes:
    """Return the content of an .xz or gzip file, which messages call `name`.

    Raises:
        ValueError: If the file is damaged, or its content has more than `most` bytes.
    """
    is_xz = path.suffix == '.xz'
    kind = 'xz' if is_xz else 'gzip'
    try:
        with lzma.open(path) if is_xz else gzip.open(path) as file:
            data = file.read(most + 1)
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f'{name} {quoted(path)} is not a whole {kind} file: {error}') from error
    if len(data) > most:
        raise ValueError(
            f'{name} {quoted(path)} must have at most {most:,} bytes when decompressed, got more'
        )
    return data


class FileDataset(BaseDataset):
    """A dataset whose pipeline reads one file per sample.

    In training, a file that raises :class:`UnusableFile` is replaced by a random other one, and
    ``skipped`` of ``data_samples`` holds the message. With ``test_mode=True`` the error stops the
    run, as metrics over different files are not comparable.

    Args:
        **kwargs: See :class:`mmengine.dataset.BaseDataset`; the last step of ``pipeline`` returns
            ``dict(inputs, data_samples)``.

    Raises:
        ValueError: If 20 files in a row are unusable.
    """

    def __getitem__(self, idx: int) -> Any:
        if self.test_mode:
            return super().__getitem__(idx)
        skipped: list[str] = []
        while len(skipped) < MAX_UNUSABLE:
            try:
                data = super().__getitem__(idx)
            except UnusableFile as error:
                skipped.append(str(error))
                idx = self._rand_another()
                continue
            if skipped:
                data['data_samples'].set_metainfo(dict(skipped=tuple(skipped)))
            return data
        raise ValueError(
            f'{MAX_UNUSABLE} files in a row cannot be used, the last one: {skipped[-1]}'
        )
