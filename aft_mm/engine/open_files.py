"""Let data loader workers send large batches without running out of open files."""

import sys

import torch

ENOUGH = 65536


def share_tensors_by_name() -> None:
    """Raise the limit on open files, or have workers send tensors by name if it stays low.

    Torch by default keeps a file open until a tensor is used.
    """
    if sys.platform == 'win32':  # tensors are sent by name anyway
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
    except (OSError, ValueError):  # macOS has a lower limit than it names
        limit = soft
    if limit < ENOUGH and 'file_system' in torch.multiprocessing.get_all_sharing_strategies():
        torch.multiprocessing.set_sharing_strategy('file_system')
