"""Train the subwords of a pair of languages: byte-pair encoding by sentencepiece, one for both.

    python tools/dataset_converters/subwords.py data/multi30k/train.de data/multi30k/train.en \
        --vocab-size 4000 --out data/multi30k/subwords.model

The text is taken as it is, without normalisation: what is decoded is what was encoded but for
spaces that follow one another. The same files give the same vocabulary.
"""

import argparse
import io
import os
from collections.abc import Sequence
from pathlib import Path

from aft_mm.cli.arguments import check_output
from aft_mm.errors import UserError, user_errors


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        'files', nargs='+', metavar='FILE', help='text of the training set, one sentence a line'
    )
    parser.add_argument('--vocab-size', type=int, required=True, help='subwords in all')
    parser.add_argument('--out', required=True, metavar='MODEL', help='FOLDER/subwords.model')
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()  # --help and a wrong argument end before the slow imports

from aft_mm.checks import check_int
from aft_mm.datasets import read_lines


def train(files: Sequence[str], vocab_size: int) -> bytes:
    """The model of the subwords of text files, plain or gzip.

    Raises:
        UserError: sentencepiece is missing, or cannot make so many subwords of the text.
    """
    try:
        import sentencepiece
    except ImportError:
        raise UserError(
            'subwords need sentencepiece, which pip install aft_mm[text] installs'
        ) from None
    model = io.BytesIO()
    lines = [line for path in files for line in read_lines(path) if line.strip()]
    if not lines:
        raise UserError(f'there is no text in {", ".join(files)}')
    try:
        # Every character gets a subword, so that of known languages nothing is unknown.
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type='bpe',
            vocab_size=vocab_size,
            character_coverage=1.0,
            normalization_rule_name='identity',
            max_sentence_length=2**20,
            pad_id=0,
            unk_id=1,
            eos_id=2,
            bos_id=-1,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = ' '.join(str(error).split()).split('] ')[-1]
        raise UserError(f'--vocab-size {vocab_size} does not suit the text: {reason}') from error
    return model.getvalue()


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with user_errors(OSError):
        check_int('--vocab-size', args.vocab_size, 1)
        check_output('--out', args.out, ('.model',))
        part = Path(f'{args.out}.part')
        part.write_bytes(train(args.files, args.vocab_size))
        os.replace(part, args.out)
        print(f'{args.vocab_size} subwords written to {args.out}')


if __name__ == '__main__':
    main()
