"""The checkpoints in a work dir, and the newest complete one."""

import re
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError

from aft_mm.errors import UserError
from aft_mm.outputs import write_whole

from .loading import load_from_local

POINTER = 'last_checkpoint'
# The best weights are saved without optimizer.
_NAME = re.compile(r'(?!best_)(\w*_)(\d+)\.pth')


def remove_parts(folder: str | Path) -> None:
    """Remove temporary files whose writer was killed."""
    for pattern in ('.*.pth.*.part', f'.{POINTER}.*.part'):
        for part in Path(folder).glob(pattern):
            part.unlink(missing_ok=True)


def write_pointer(folder: str | Path, checkpoint: str) -> None:
    with write_whole(Path(folder, POINTER)) as file:
        file.write(checkpoint.encode())


def checkpoints_in(folder: str | Path) -> list[Path]:
    """Return the checkpoints of a run, sorted by name and number, newest first."""
    checkpoints = [
        (match.group(1), int(match.group(2)), path)
        for path in Path(folder).glob('*.pth')
        if (match := _NAME.fullmatch(path.name))
    ]
    return [path for _, _, path in sorted(checkpoints, reverse=True)]


def latest_checkpoint(folder: str | Path) -> tuple[str | None, str]:
    """Find the checkpoint from which a run in ``folder`` resumes, the newest complete one.

    Returns:
        Its path or None, and a warning if ``last_checkpoint`` names another one, else ''.

    Raises:
        UserError: There are checkpoints, but all are damaged.
    """
    pointer = Path(folder, POINTER)
    why = f'{str(pointer)!r} is missing'
    if pointer.exists():
        try:
            named = pointer.read_text().strip()
            if named:
                num_iterations(named)
                return named, ''
            why = f'{str(pointer)!r} is empty'
        except (OSError, ValueError, UnpicklingError) as error:
            why = f'the checkpoint named by {str(pointer)!r} cannot be used ({error})'
    complete: dict[str, tuple[int, str]] = {}  # the newest by the beginning of the name
    others = checkpoints_in(folder)
    for path in others:
        kind = path.name.rpartition('_')[0]
        if kind not in complete:
            with suppress(OSError, UnpicklingError):
                complete[kind] = num_iterations(path), str(path)
    if complete:
        _, best = max(complete.values(), key=lambda entry: entry[0])
        return best, f'{why}; the run resumes from {best!r}, the newest complete checkpoint'
    if others or pointer.exists():
        raise UserError(
            f'--resume finds no complete checkpoint in {str(folder)!r}: {why}, and '
            f'{len(others)} others there are damaged; name one with --resume CHECKPOINT, or train '
            'without --resume in another --work-dir'
        )
    return None, ''


def num_iterations(path: str | Path) -> int:
    """Read a training checkpoint completely and return its iteration; raises as load_from_local."""
    checkpoint = load_from_local(str(path))
    done = checkpoint.get('meta', {}).get('iter')
    if 'optimizer' not in checkpoint or type(done) is not int:
        raise UnpicklingError(f'checkpoint {str(path)!r} holds no optimizer state')
    return done
