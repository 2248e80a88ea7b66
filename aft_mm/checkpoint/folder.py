"""Checkpoints in a work dir, and the newest one that is whole."""

import re
from pathlib import Path
from pickle import UnpicklingError

from aft_mm.errors import UserError

from .loading import load_from_local
from .writing import write_whole

POINTER = 'last_checkpoint'
# epoch_12.pth, iter_300.pth; what save_best writes has no optimizer and nothing goes on from there.
_NAME = re.compile(r'(?!best_)(\w*_)(\d+)\.pth')


def remove_parts(folder: str | Path) -> None:
    """Remove what writers that were killed have left of checkpoints."""
    for part in Path(folder).glob('.*.pth.*.part'):
        part.unlink(missing_ok=True)


def write_pointer(folder: str | Path, checkpoint: str) -> None:
    """Let ``last_checkpoint`` name a checkpoint; at no moment is it empty or half a name."""
    with write_whole(Path(folder, POINTER)) as file:
        file.write(checkpoint.encode())


def checkpoints_in(folder: str | Path) -> list[Path]:
    """The checkpoints of a run, by name and then by number, the newest first."""
    found = [
        (match.group(1), int(match.group(2)), path)
        for path in Path(folder).glob('*.pth')
        if (match := _NAME.fullmatch(path.name))
    ]
    return [path for _, _, path in sorted(found, reverse=True)]


def latest_checkpoint(folder: str | Path) -> tuple[str | None, str]:
    """The checkpoint from which a run in ``folder`` goes on, None if it has none.

    It is the one that ``last_checkpoint`` names or, where that names none that is whole, the
    newest whole one in the folder.

    Returns:
        Its path, and a sentence that says why if it is not the one that is named, else ''.

    Raises:
        UserError: there are checkpoints, but none is whole.
    """
    pointer = Path(folder, POINTER)
    why = f'{str(pointer)!r} is missing'
    if pointer.exists():
        try:
            named = pointer.read_text().strip()
            if named:
                iterations(named)
                return named, ''
            why = f'{str(pointer)!r} is empty'
        except (OSError, ValueError, UnpicklingError) as error:
            why = f'what {str(pointer)!r} names cannot be used ({error})'
    best: tuple[int, Path] | None = None
    kinds = set()  # that have a whole one
    others = checkpoints_in(folder)
    for path in others:
        kind = path.name.rpartition('_')[0]
        if kind in kinds:
            continue
        try:
            done = iterations(path)
        except (OSError, UnpicklingError):
            continue
        kinds.add(kind)
        if best is None or done > best[0]:
            best = done, path
    if best:
        return str(best[1]), (
            f'{why}; the run goes on from {str(best[1])!r}, the newest checkpoint that is whole'
        )
    if others or pointer.exists():
        raise UserError(
            f'--resume finds no whole checkpoint in {str(folder)!r}: {why}, and '
            f'{len(others)} others there are damaged; name one with --resume CHECKPOINT, or train '
            'without --resume in another --work-dir'
        )
    return None, ''


def iterations(path: str | Path) -> int:
    """How many iterations were done at a checkpoint of a run, all of which is read.

    Raises:
        FileNotFoundError: there is none.
        UnpicklingError: it is damaged, or no run goes on from it.
    """
    checkpoint = load_from_local(str(path))
    done = checkpoint.get('meta', {}).get('iter')
    if 'optimizer' not in checkpoint or type(done) is not int:
        raise UnpicklingError(f'checkpoint {str(path)!r} holds no state of an optimizer')
    return done
