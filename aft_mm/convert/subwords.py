import argparse
import io
from collections.abc import Sequence

from aft_mm.checks import check_int
from aft_mm.datasets import read_lines
from aft_mm.errors import UserError, import_from_extra, user_errors
from aft_mm.outputs import check_output, write_whole


def train(files: Sequence[str], vocab_size: int, byte_fallback: bool) -> bytes:
    sentencepiece = import_from_extra('sentencepiece', 'text', 'subwords need')
    model = io.BytesIO()
    lines = [line for path in files for line in read_lines(path) if line.strip()]
    if not lines:
        raise UserError(f'there is no text in {", ".join(files)}')
    try:
        # With full coverage, every character of the training text has a subword; others are bytes,
        # or unknown without them.
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type='bpe',
            vocab_size=vocab_size,
            character_coverage=1.0,
            byte_fallback=byte_fallback,
            normalization_rule_name='identity',
            max_sentence_length=2**20,
            pad_id=0,
            unk_id=1,
            eos_id=2,
            bos_id=-1,
            minloglevel=2,
        )
    except RuntimeError as error:
        # Its advice names options of sentencepiece.
        reason = ' '.join(str(error).split()).split('] ')[-1].partition(' Increase vocab_size')[0]
        raise UserError(
            f'--vocab-size {vocab_size} is not possible for the text: {reason}'
        ) from error
    return model.getvalue()


def run(args: argparse.Namespace) -> None:
    with user_errors(OSError):
        check_int('--vocab-size', args.vocab_size, 1)
        check_output('--out', args.out, ('.model',), args.files)
        with write_whole(args.out) as file:
            file.write(train(args.files, args.vocab_size, args.byte_fallback))
        print(f'wrote {args.vocab_size} subwords to {args.out}')
