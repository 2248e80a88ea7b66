"""What the command lines of the benchmarks share: options, and one sentence for what is wrong."""

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from record import default_device

from aft_mm.cli.allocator import keep_freed_memory
from aft_mm.cli.errors import one_sentence


def positive_int(text: str) -> int:
    """The whole number, at least 1, that the text is."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'must be a whole number of at least 1, got {text!r}')
    return int(text)


def device(text: str) -> str:
    """The name of a device that is here: 'cpu', 'cuda' or 'cuda:INDEX'."""
    kind, _, index = text.partition(':')
    if text == 'cpu':
        return text
    if kind != 'cuda' or (text != 'cuda' and not index.isdecimal()):
        raise argparse.ArgumentTypeError(f'must be cpu, cuda or cuda:INDEX, got {text!r}')
    count = torch.cuda.device_count()
    if int(index or 0) >= count:
        raise argparse.ArgumentTypeError(f'must be one of the {count} GPUs found, got {text!r}')
    return text


@contextmanager
def named_in_errors(parser: argparse.ArgumentParser, option: str) -> Iterator[None]:
    """What the inside refuses ends the run as an error of this option, with exit status 2."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        parser.error(f'argument {option}: {error}')


def common_parser(
    doc: str, defaults: Mapping[str, Mapping[str, Any]] | None = None
) -> argparse.ArgumentParser:
    """A parser of the options that all tools have; `doc` is the docstring of the tool.

    defaults: per type of device, what :func:`fill_in` gives to options that were left out.
    """
    epilog = ' '.join(f'Defaults on {k}: {_written(v)}.' for k, v in (defaults or {}).items())
    parser = argparse.ArgumentParser(description=doc.splitlines()[0], epilog=epilog)
    parser.add_argument('--rounds', type=positive_int, help='how often each form is timed')
    parser.add_argument(
        '--device', type=device, default=default_device(), help='default: %(default)s'
    )
    parser.add_argument(
        '--threads',
        type=positive_int,
        default=torch.get_num_threads(),
        help='of a CPU; default: %(default)s',
    )
    parser.add_argument('--json', type=Path, help='write rows and the environment here')
    return parser


def _written(options: Mapping[str, Any]) -> str:
    """The options as a command line has them."""
    values = {k: v if isinstance(v, list) else [v] for k, v in options.items()}
    return ' '.join(f'--{k} {" ".join(map(str, v))}' for k, v in values.items())


def fill_in(args: argparse.Namespace, defaults: Mapping[str, Mapping[str, Any]]) -> None:
    """Give the options that were left out the defaults of the device."""
    for name, value in defaults[torch.device(args.device).type].items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def set_up_torch(args: argparse.Namespace) -> None:
    """Threads, the allocator of the tools, and float32 that is float32.

    cuDNN would cut its operands to TF32 by default. Whether freed memory is kept becomes one of the
    settings that the JSON records.
    """
    with one_sentence():
        args.freed_memory_kept = keep_freed_memory()
    torch.set_num_threads(args.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
