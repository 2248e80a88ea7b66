"""What data sets of files share."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.dataset import BaseDataset

from aft_mm.errors import UnusableFile

MAX_UNUSABLE = 20  # in a row


class FileDataset(BaseDataset):
    """A dataset whose pipeline reads one file per sample.

    In training, a file that raises :class:`UnusableFile` is replaced by a random other one, and
    ``skipped`` of ``data_samples`` holds the message. With ``test_mode=True`` the error stops the
    run.

    Args:
        **kwargs: See :class:`mmengine.dataset.BaseDataset`; the last step of ``pipeline`` returns
            ``dict(inputs, data_samples)``.

    Raises:
        ValueError: If 20 files in a row are unusable.
    """

    @property
    def replaces_files(self) -> bool:
        """Whether an unusable file is replaced by another one, as a loader of ours says which are."""
        loaders = self.pipeline.transforms[:1]
        ours = any(type(loader).__module__.startswith('aft_mm.') for loader in loaders)
        return ours and not self.test_mode

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


def read_arrays(path: Path, *names: str) -> list[np.ndarray] | None:
    """Return arrays of a file of :func:`write_arrays`, None if it is missing or damaged."""
    # numpy and zipfile raise anything for changed bytes.
    with suppress(Exception), path.open('rb') as file, np.load(file) as content:
        return [content[name] for name in names]
    return None


def write_arrays(path: Path, **arrays: np.ndarray) -> None:
    part = path.with_name(f'{path.stem}.{os.getpid()}.part.npz')  # one per worker
    np.savez(part, **arrays)  # type: ignore[arg-type]
    part.replace(path)
