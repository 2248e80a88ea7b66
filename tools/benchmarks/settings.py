"""What the options of a benchmark are on the device that it runs on, and torch set to them."""

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from arguments import named_in_errors
from record import default_device

from aft_mm.engine.allocator import keep_freed_memory
from aft_mm.errors import user_errors


def fill_in(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    defaults: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Give the options that were left out the values of the device, which must be here.

    defaults: per type of device, those of the tool.
    """
    args.device = args.device or default_device()
    args.threads = args.threads or torch.get_num_threads()
    with named_in_errors(parser, '--device'):
        check_present(args.device)
    for name, value in (defaults or {}).get(torch.device(args.device).type, {}).items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def check_present(device: str) -> None:
    """ValueError if 'cuda' or 'cuda:INDEX' is not a GPU of this machine."""
    kind, _, index = device.partition(':')
    count = torch.cuda.device_count()
    if kind == 'cuda' and int(index or 0) >= count:
        raise ValueError(f'must be one of the {count} GPUs found, got {device!r}')


def set_up_torch(args: argparse.Namespace) -> None:
    """Threads, the allocator of the tools, and float32 that is float32.

    cuDNN would cut its operands to TF32 by default. Whether freed memory is kept becomes one of the
    settings that the JSON records.
    """
    with user_errors():
        args.freed_memory_kept = keep_freed_memory()
    torch.set_num_threads(args.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
