"""A dataset of many files, some of which may be damaged."""

from typing import Any

from mmengine.dataset import BaseDataset

MAX_UNUSABLE = 20  # in a row: one chance in a million if half of the files are damaged


class UnusableFile(ValueError):  # noqa: N818 - not always an error: training replaces the file
    """A file that cannot become a sample; the message is one line with its name."""


def reason_of(error: Exception) -> str:
    """Return why a file cannot be read, without the wording of the library that read it."""
    if isinstance(error, FileNotFoundError):
        return 'it does not exist'
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return 'it is damaged or of another kind than its name says'


class FileDataset(BaseDataset):
    """A dataset whose pipeline reads one file per sample.

    In training, a file for which the pipeline raises :class:`UnusableFile` is replaced by a random
    other one. The message is kept in ``skipped`` of its ``data_samples``, where SkippedDataReportHook
    counts it. With ``test_mode=True`` the error stops the run, since metrics over different files
    cannot be compared.

    Args:
        **kwargs: Arguments of :class:`mmengine.dataset.BaseDataset`; the last step of ``pipeline``
            returns ``dict(inputs, data_samples)``.

    Raises:
        ValueError: If 20 files in a row are unusable.
    """

    def __getitem__(self, idx: int) -> Any:
        """Return the sample of a file, or of another one with ``skipped`` in its metainfo."""
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
