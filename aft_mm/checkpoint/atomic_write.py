"""mmengine's writing of checkpoints, each of which appears only when it is complete."""

from pathlib import Path

from mmengine.fileio import LocalBackend, register_backend

from aft_mm.outputs import write_whole

#: `backend_args` of mmengine for :func:`aft_mm.outputs.write_whole`.
ATOMIC_BACKEND = dict(backend='aft_mm.AtomicFileBackend')


class AtomicFileBackend(LocalBackend):
    def put(self, obj: bytes, filepath: str | Path) -> None:
        Path(filepath).parent.mkdir(parents=True, exist_ok=True)
        with write_whole(filepath) as file:
            file.write(obj)


register_backend(ATOMIC_BACKEND['backend'], AtomicFileBackend, force=True)
