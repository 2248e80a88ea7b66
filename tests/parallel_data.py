"""A small artificial language pair: words are translated one by one and reversed."""

import importlib.util
from pathlib import Path

import numpy as np

from .helpers import command

WORDS = dict(
    zip(
        'ein zwei Hund Mann läuft schläft rot grün Straße Über'.split(),
        'one two dog man runs sleeps red green street over'.split(),
        strict=True,
    )
)
NEEDED = 'sentencepiece', 'sacrebleu'
MISSING = [name for name in NEEDED if not importlib.util.find_spec(name)]
REASON = f'{" and ".join(MISSING)} missing, which the extra text installs'
VOCAB_SIZE = 64


def sentences(count: int, seed: int = 0) -> tuple[list[str], list[str]]:
    """Return sentences of 1 to 9 words and their translations."""
    rng = np.random.default_rng(seed)
    sources = [list(rng.choice(list(WORDS), rng.integers(1, 10))) for _ in range(count)]
    return (
        [' '.join(words) + '.' for words in sources],
        [' '.join(WORDS[word] for word in reversed(words)) + '.' for words in sources],
    )


def write_pairs(folder: Path) -> None:
    for seed, (split, count) in enumerate((('train', 120), ('val', 13))):
        for language, lines in zip(('de', 'en'), sentences(count, seed), strict=True):
            (folder / f'{split}.{language}').write_text('\n'.join(lines) + '\n', encoding='utf-8')
    write_subwords(folder, folder / 'subwords.model')


def write_subwords(folder: Path, out: Path) -> None:
    files = [str(folder / f'train.{language}') for language in ('de', 'en')]
    options = ['--vocab-size', str(VOCAB_SIZE), '--no-byte-fallback', '--out', str(out)]
    command('convert subwords')([*files, *options])
