import argparse
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import islice
from typing import BinaryIO

from mmengine.config import Config

from aft_mm.apis import Translator
from aft_mm.apis.loading import check_task
from aft_mm.apis.translator import BEAM, beam_options
from aft_mm.checkpoint import averaged
from aft_mm.checks import check_int, check_number
from aft_mm.cli.arguments import refuse_given, sampling_options
from aft_mm.config.reading import read_config
from aft_mm.engine import derived_seed
from aft_mm.engine.allocator import keep_freed_memory
from aft_mm.errors import DATA_ERRORS, user_errors
from aft_mm.progress import progress
from aft_mm.tokenizers import split_lines

BATCHES = 16  # whose lines are sorted by length together
SAMPLING = ('temperature', 'top_k', 'top_p', 'greedy', 'seed', 'compile')


def check_args(args: argparse.Namespace) -> Config:
    config = read_config(args.config, args.cfg_options)
    check_task(config, 'Translator')
    if args.sample:
        refuse_given(args, (*BEAM, 'n_best'), 'and --sample cannot be combined')
    else:
        refuse_given(args, SAMPLING, 'has no effect without --sample')
    for name, value in beam_options(config).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name in ('batch_size', 'beam_size'):
        check_int(f'--{name.replace("_", "-")}', getattr(args, name), 1)
    check_number('--length-penalty', args.length_penalty, 0, 10)
    if args.n_best is not None:
        check_int('--n-best', args.n_best, 1, args.beam_size)
    return config


def read_chunks(file: BinaryIO, size: int) -> Iterator[list[str]]:
    """Yield ``size`` lines of a file at a time; invalid UTF-8 is reported on stderr."""
    first = 0
    while rows := list(islice(file, size)):
        lines, invalid = split_lines(b''.join(rows))
        for number in invalid:
            print(
                f'line {first + number} is not valid UTF-8; invalid bytes became U+FFFD',
                file=sys.stderr,
            )
        yield lines
        first += len(rows)


def translate(args: argparse.Namespace, translator: Translator, out: BinaryIO) -> None:
    done = 0
    size = BATCHES * args.batch_size
    for lines in progress(read_chunks(sys.stdin.buffer, size), f'translating, {size} lines each'):
        translator.first_number = done + 1
        for text in output_lines(args, translator, lines, done):
            out.write(f'{text}\n'.encode())
        out.flush()
        done += len(lines)


def output_lines(
    args: argparse.Namespace, translator: Translator, lines: list[str], first: int
) -> Iterator[str]:
    beam = dict(beam_size=args.beam_size, length_penalty=args.length_penalty)
    if args.sample:
        options = sampling_options(args)
        if first:
            options['seed'] = derived_seed(options['seed'], first)
        yield from translator.sample(lines, args.batch_size, **options)
    elif args.n_best is None:
        yield from translator(lines, args.batch_size, **beam)
    else:
        results = translator.n_best(lines, args.n_best, args.batch_size, **beam)
        for number, translations in enumerate(results, first):
            yield from (f'{number} ||| {one.text} ||| {one.score:.4f}' for one in translations)


def run(args: argparse.Namespace) -> None:
    out = sys.stdout.buffer
    # mmengine logs to stdout.
    with user_errors(*DATA_ERRORS), redirect_stdout(sys.stderr):
        keep_freed_memory()
        config = check_args(args)
        with averaged(args.checkpoint, args.average) as checkpoint:
            translator = Translator(config, checkpoint, args.device)
        translate(args, translator, out)
