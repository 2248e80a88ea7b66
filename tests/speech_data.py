"""A few seconds of sound with transcripts; every character has its own pitch."""

import numpy as np

RATE = 8000
PITCHES = {' ': 0, 'a': 400, 'b': 1000, 'c': 2200}


def say(text, seed=0):
    """Return float64 [N]: 0.1 s per character followed by an equal pause, with a little noise."""
    time = np.arange(RATE // 10) / RATE
    parts = [np.concatenate([0.3 * np.sin(2 * np.pi * PITCHES[c] * time), 0 * time]) for c in text]
    sound = np.concatenate(parts)
    return sound + 0.01 * np.random.default_rng(seed).standard_normal(len(sound))


def write_sound(folder):
    import soundfile

    rng = np.random.default_rng(0)
    (folder / 'sound').mkdir(exist_ok=True)
    lines = []
    for index in range(30):
        text = ''.join(rng.choice(list('abc'), rng.integers(1, 5)))
        text = ' '.join((text[:2], text[2:])).strip()
        name = f'{index}-{"xy"[index % 2]}'
        soundfile.write(folder / f'sound/{name}.wav', say(text, index), RATE)
        lines.append(f'{name} {text}\n')
    (folder / 'sound/train.txt').write_text(''.join(lines[:23]))
    (folder / 'sound/test.txt').write_text(''.join(lines[23:]))
