"""Data sets of many files, some of which may be damaged."""

from typing import Any

from mmengine.dataset import BaseDataset

MAX_UNUSABLE = 20  # in a row; with fewer than half of the files damaged one in a million


class UnusableFile(ValueError):  # noqa: N818 - it is about the file, which may be replaced
    """A file that cannot become a sample; the message is one sentence that names it."""


def reason_of(error: Exception) -> str:
    """Why a file cannot be read, without the words of the library that met the damage."""
    if isinstance(error, FileNotFoundError):
        return 'it does not exist'
    if isinstance(error, OSError) and error.strerror:  # of the operating system
        return error.strerror
    return 'it is damaged or of another kind than its name says'


class FileDataset(BaseDataset):
    """Each sample is read from a file of its own by the pipeline.

    In training a file for which the pipeline raises :class:`UnusableFile` is passed over: another
    one, drawn at random, takes its place, and the sentence is kept in ``skipped`` of that one's
    ``data_samples``, where SkippedDataReportHook counts it. With ``test_mode=True`` the error stops the
    run, because a measure over other files would be another measure.

    Args:
        **kwargs: Those of :class:`mmengine.dataset.BaseDataset`; the last step of ``pipeline``
            gives ``dict(inputs, data_samples)``.

    Raises:
        ValueError: 20 files in a row could not be used.
    """

    def __getitem__(self, idx: int) -> Any:
        """The sample of a file, or that of another one with ``skipped`` in its metainfo."""
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
