"""The options that the command lines of the benchmarks share, read before anything imports torch.

What a device decides of them is filled in afterwards, see settings.py.
"""

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DTYPES = ('float32', 'float16', 'bfloat16')


def positive_int(text: str) -> int:
    """The whole number, at least 1, that the text is."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'must be a whole number of at least 1, got {text!r}')
    return int(text)


def device(text: str) -> str:
    """The name of a device: 'cpu', 'cuda' or 'cuda:INDEX'."""
    kind, _, index = text.partition(':')
    if text not in ('cpu', 'cuda') and (kind != 'cuda' or not index.isdecimal()):
        raise argparse.ArgumentTypeError(f'must be cpu, cuda or cuda:INDEX, got {text!r}')
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

    defaults: per type of device, what :func:`settings.fill_in` gives to options left out.
    """
    epilog = ' '.join(f'Defaults on {k}: {_written(v)}.' for k, v in (defaults or {}).items())
    parser = argparse.ArgumentParser(description=doc.splitlines()[0], epilog=epilog)
    parser.add_argument('--rounds', type=positive_int, help='how often each form is timed')
    parser.add_argument(
        '--device', type=device, help='cpu, cuda or cuda:INDEX; default: a GPU where there is one'
    )
    parser.add_argument('--threads', type=positive_int, help='of a CPU; default: as torch has it')
    parser.add_argument('--json', type=Path, help='write rows and the environment here')
    return parser


def _written(options: Mapping[str, Any]) -> str:
    """The options as a command line has them."""
    values = {k: v if isinstance(v, list) else [v] for k, v in options.items()}
    return ' '.join(f'--{k} {" ".join(map(str, v))}' for k, v in values.items())
