"""What mmengine loads checkpoints with."""

import functools
import hashlib
import http.client
import os
import pickle
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from mmengine.dist import barrier, is_distributed
from mmengine.runner import CheckpointLoader
from mmengine.runner.checkpoint import get_torchvision_models

from aft_mm.cli.errors import UserError

from .archive import read_archive
from .notes import Refused
from .plain import restored_hub
from .writing import write_whole

# As torch.hub reads names: NAME-<first digits of the sha256>.pth
_HASH = re.compile(r'-([0-9a-f]{8,64})\.\w+$')
_TIMEOUT = 60  # seconds without a byte


def _load(filename: str, map_location: Any) -> dict:
    """Read a file and say in one sentence why it is refused."""
    try:
        checkpoint = read_archive(filename, map_location)
        if isinstance(checkpoint, dict) and 'message_hub' in checkpoint:
            checkpoint['message_hub'] = restored_hub(checkpoint['message_hub'])
    except Refused as error:
        raise pickle.UnpicklingError(
            f'checkpoint {filename!r} is refused because it asks for {error}, which is neither a '
            'weight nor the training state of mmengine') from error
    except OSError:
        raise
    except Exception as error:  # what a parser meets in a damaged file, it has not foreseen
        reason = ' '.join(str(error).split())
        raise pickle.UnpicklingError(
            f'checkpoint {filename!r} is damaged or holds something other than weights and '
            f'training state ({type(error).__name__}: {reason:.200})') from error
    if not isinstance(checkpoint, dict):
        raise pickle.UnpicklingError(f'checkpoint {filename!r} holds a '
                                     f'{type(checkpoint).__name__} instead of a dict')
    meta = checkpoint.get('meta', {})
    if not isinstance(meta, dict):
        raise pickle.UnpicklingError(f'checkpoint {filename!r} holds a {type(meta).__name__} as '
                                     'meta instead of a dict')
    # mmengine's Runner.resume executes this entry of old checkpoints as a python file.
    meta.pop('config', None)
    return checkpoint


def load_from_local(filename: str, map_location: Any = None) -> dict:
    """Load a checkpoint file: weights and the training state of mmengine, and nothing else.

    Nothing that the file names is called, every record is compared with its checksum, and the
    values take no more memory than the size of the file allows. What this file holds is plain
    types, mmengine's log history and its meta with the text of a config, which is a program.

    Args:
        filename: Path of the file.
        map_location: Device of the tensors, by default the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        pickle.UnpicklingError: the file asks for anything else, is damaged, or holds no dict.
    """
    filename = os.path.expanduser(filename)
    if not os.path.isfile(filename):
        raise FileNotFoundError(f'checkpoint {filename!r} does not exist')
    return _load(filename, map_location)


def load_from_http(filename: str, map_location: Any = None) -> dict:
    """Download a checkpoint into torch's hub folder and load it as :func:`load_from_local` does.

    The copy there is that of the whole address. It is as long as the server said and fits the
    digits of a sha256 in the name, as torch.hub writes them, or there is none. One process per
    machine downloads.

    Raises:
        UserError: the download failed.
        pickle.UnpicklingError: as for :func:`load_from_local`.
    """
    first_on_machine = int(os.environ.get('LOCAL_RANK', 0)) == 0
    if is_distributed() and not first_on_machine:
        barrier()
    try:
        path = cached(filename)
    finally:  # also after an error, for which the others would wait in vain
        if is_distributed() and first_on_machine:
            barrier()
    try:
        return _load(str(path), map_location)
    except pickle.UnpicklingError:
        path.unlink(missing_ok=True)  # so that the next try does not meet it again
        raise


def cached(address: str) -> Path:
    """The file of an address in torch's hub folder, downloaded if it is not there.

    Raises:
        UserError: the download failed.
    """
    name = re.sub(r'[^\w.-]', '_', os.path.basename(urlparse(address).path))[-100:]
    folder = Path(torch.hub.get_dir(), 'checkpoints')
    path = folder / f'{hashlib.sha256(address.encode()).hexdigest()[:16]}_{name}'
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _download(address, path)
        except (OSError, http.client.HTTPException) as error:
            raise UserError(f'checkpoint {address!r} cannot be downloaded: {error}') from error
    return path


def _download(address: str, path: Path) -> None:
    """Write what an address holds to ``path``, whole and with the hash of its name, or nothing."""
    digest, num_bytes = hashlib.sha256(), 0
    with urllib.request.urlopen(address, timeout=_TIMEOUT) as source, write_whole(path) as file:
        while block := source.read(2**20):
            file.write(block)
            digest.update(block)
            num_bytes += len(block)
        announced = source.headers.get('Content-Length')
        if announced is not None and num_bytes != int(announced):
            raise OSError(f'{num_bytes} of {announced} bytes came')
        wanted = _HASH.search(urlparse(address).path)
        if wanted and not digest.hexdigest().startswith(wanted.group(1)):
            raise OSError(f'its sha256 begins with {digest.hexdigest()[:8]}, but its name says '
                          f'{wanted.group(1)}')


def load_from_torchvision(filename: str, map_location: Any = None) -> dict:
    """Load ``torchvision://NAME`` from its address as :func:`load_from_http` does.

    Raises:
        UserError: torchvision knows no such name.
    """
    name = filename.partition('://')[2]
    addresses = get_torchvision_models()
    if name not in addresses:
        raise UserError(f'checkpoint {filename!r} is none of torchvision')
    return load_from_http(addresses[name], map_location)


def load_from_openmmlab(filename: str, map_location: Any = None) -> dict:
    """Raise a :class:`UserError`, because the host of these addresses serves no more."""
    raise UserError(f'checkpoint {filename!r} is on a host that serves no more; give a file or an '
                    'http address')


def _without_program(load: Callable[..., dict]) -> Callable[..., dict]:
    """``load`` without the text of a config, which mmengine's inferencers run as a program."""

    @functools.wraps(load)
    def call(filename: str, map_location: Any = None) -> dict:
        checkpoint = load(filename, map_location)
        checkpoint.get('meta', {}).pop('cfg', None)
        return checkpoint

    return call


def register_safe_loading() -> None:
    """Let every checkpoint that mmengine loads from a file or an http address go through here.

    Calling it again changes nothing.
    """
    for prefixes, load in _LOADERS.items():
        CheckpointLoader.register_scheme(prefixes, load, force=True)


_LOADERS = {
    '': _without_program(load_from_local),
    ('http://', 'https://'): _without_program(load_from_http),
    ('torchvision://', 'modelzoo://'): _without_program(load_from_torchvision),
    ('open-mmlab://', 'openmmlab://', 'mmcls://'): load_from_openmmlab,
}
