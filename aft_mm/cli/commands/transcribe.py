import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout

from mmengine.config import Config

from aft_mm.apis import Recognition, SpeechRecognizer
from aft_mm.apis.loading import check_task
from aft_mm.checks import check_encodable, check_int
from aft_mm.config.reading import read_config
from aft_mm.engine.allocator import keep_freed_memory
from aft_mm.errors import DATA_ERRORS, UserError, user_errors
from aft_mm.outputs import PICTURES, check_output
from aft_mm.progress import progress
from aft_mm.visualization import draw_alignment


def check_args(args: argparse.Namespace) -> Config:
    config = read_config(args.config, args.cfg_options)
    check_task(config, 'SpeechRecognizer')
    check_int('--batch-size', args.batch_size, 1)
    beam_size = config.model.get('beam_size', 1) if args.beam_size is None else args.beam_size
    check_int('--beam-size', beam_size, 1)
    check_int(f'--num-best with a beam size of {beam_size}', args.num_best, 1, beam_size)
    if args.transcript is not None and not args.picture:
        raise UserError('--transcript needs --picture, for whose title it is used')
    check_encodable('--transcript', args.transcript or '')
    if args.picture:
        check_output('--picture', args.picture, PICTURES)
    return config


def recognise(
    args: argparse.Namespace, recognizer: SpeechRecognizer, files: Sequence[str]
) -> Iterator[tuple[str, Recognition | None]]:
    for start in range(0, len(files), args.batch_size):
        part = files[start : start + args.batch_size]
        samples: dict[int, dict] = {}
        for index, path in enumerate(part):
            try:
                samples[index] = recognizer.read(path)
                for warning in samples[index]['data_samples'].get('warnings', {}):
                    print(f'{path}: {warning}', file=sys.stderr)
            except UserError as error:
                print(f'{path}: {error}', file=sys.stderr)
        results = recognizer.stream(list(samples.values()), args.beam_size, args.batch_size)
        by_index = dict(zip(samples, results, strict=True))
        for index, path in enumerate(part):
            yield path, by_index.get(index)


def lines(path: str, recognition: Recognition | None, num_best: int) -> Iterator[str]:
    # A tab or a line break in a name would add a column or a line; lone surrogates cannot be printed.
    path = repr(path) if re.search('[\0-\x1f\x7f\ud800-\udfff]', path) else path
    if num_best == 1:
        yield f'{path}\t{recognition.text if recognition else ""}'
    elif recognition is None:
        yield f'{path}\t\t'
    else:
        for text, score in recognition.alternatives[:num_best]:
            yield f'{path}\t{score:.3f}\t{text}'


def run(args: argparse.Namespace) -> None:
    with user_errors(*DATA_ERRORS):
        keep_freed_memory()
        with redirect_stdout(sys.stderr):  # mmengine logs to stdout, which is for transcripts
            config = check_args(args)
            files = args.files or [line for line in sys.stdin.read().splitlines() if line.strip()]
            if not files:
                raise UserError('FILE must be given, as arguments or as lines of stdin')
            recognizer = SpeechRecognizer(config, args.checkpoint, args.device)
        lost = 0
        several = len(files) > args.batch_size
        results = recognise(args, recognizer, files)
        shown = progress(results, 'Transcribing', len(files), several)
        for index, (path, recognition) in enumerate(shown):
            for line in lines(path, recognition, args.num_best):
                print(line, flush=True)
            lost += recognition is None
            if args.picture and index == 0:
                report = f'{args.picture} is not written, because the first file cannot be read'
                if recognition is not None:
                    names, seconds = recognizer.units.names, recognizer.seconds_per_frame
                    figure = draw_alignment(recognition.log_probs, names, seconds, args.transcript)
                    figure.savefig(args.picture, dpi=110)
                    report = f'written to {args.picture}'
                print(report, file=sys.stderr)
    if lost:
        raise SystemExit(1)
