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

from aft_mm.errors import UserError

from .archive import read_archive
from .notes import Refused
from .plain import restored_hub
from .tensors import SUFFIX, read_safetensors
from .writing import write_whole

# As torch.hub reads names: NAME-<first digits of the sha256>.pth
_HASH = re.compile(r'-([0-9a-f]{8,64})\.\w+$')
# As pip reads addresses: ADDRESS#sha256=<all digits>
_FRAGMENT = 'sha256='
_HUB = 'hf://'
_TIMEOUT = 60  # seconds without a byte


def _load(filename: str, map_location: Any) -> dict:
    """Read a file and say in one sentence why it is refused."""
    try:
        read = read_safetensors if filename.endswith(SUFFIX) else read_archive
        checkpoint = read(filename, map_location)
        if isinstance(checkpoint, dict) and 'message_hub' in checkpoint:
            checkpoint['message_hub'] = restored_hub(checkpoint['message_hub'])
    except Refused as error:
        raise pickle.UnpicklingError(
            f'checkpoint {filename!r} is refused because it asks for {error}, which is neither a '
            'weight nor the training state of mmengine'
        ) from error
    except OSError:
        raise
    except Exception as error:  # what a parser meets in a damaged file, it has not foreseen
        reason = ' '.join(str(error).split())
        raise pickle.UnpicklingError(
            f'checkpoint {filename!r} is damaged or holds something other than weights and '
            f'training state ({type(error).__name__}: {reason:.200})'
        ) from error
    if not isinstance(checkpoint, dict):
        raise pickle.UnpicklingError(
            f'checkpoint {filename!r} holds a {type(checkpoint).__name__} instead of a dict'
        )
    meta = checkpoint.get('meta', {})
    if not isinstance(meta, dict):
        raise pickle.UnpicklingError(
            f'checkpoint {filename!r} holds a {type(meta).__name__} as meta instead of a dict'
        )
    # mmengine's Runner.resume executes this entry of old checkpoints as a python file.
    meta.pop('config', None)
    return checkpoint


def load_from_local(filename: str, map_location: Any = None) -> dict:
    """Load a checkpoint file: weights and the training state of mmengine, and nothing else.

    A name that ends in ``.safetensors`` is read by that library, all others as torch.save's files.

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

    The copy there is that of the whole address. It is as long as the server said and has the sha256
    that the address names, in full as ``ADDRESS#sha256=...`` or by its first digits in the name of
    the file, as torch.hub writes them, or there is none. One process per machine downloads.

    Raises:
        UserError: the download failed, or ``#`` is followed by anything but a sha256.
        pickle.UnpicklingError: as for :func:`load_from_local`.
    """
    path = _first_on_machine(cached, filename)
    try:
        return _load(str(path), map_location)
    except pickle.UnpicklingError:
        path.unlink(missing_ok=True)  # so that the next try does not meet it again
        raise


def _first_on_machine(download: Callable[[str], Path], address: str) -> Path:
    """The file that ``download`` gives, which one process of a machine calls before the others."""
    first = int(os.environ.get('LOCAL_RANK', 0)) == 0
    if is_distributed() and not first:
        barrier()
    try:
        return download(address)
    finally:  # also after an error, for which the others would wait in vain
        if is_distributed() and first:
            barrier()


def load_from_hub(filename: str, map_location: Any = None) -> dict:
    """Load ``hf://ORG/NAME/FILE`` of the Hugging Face hub as :func:`load_from_local` does.

    ``hf://ORG/NAME@REVISION/FILE`` is that of a branch, tag or commit; ``#sha256=...`` at the end
    is compared with the file. huggingface_hub downloads into its own cache, once per machine.

    Raises:
        UserError: huggingface_hub is missing, the address is none of these, the file cannot be
            had, or has another sha256.
        pickle.UnpicklingError: as for :func:`load_from_local`.
    """
    return _load(str(_first_on_machine(_from_hub, filename)), map_location)


def _from_hub(filename: str) -> Path:
    address, wanted = _split_hash(filename)
    org, name, path = (address.removeprefix(_HUB).split('/', 2) + ['', ''])[:3]
    name, _, revision = name.partition('@')
    if not (org and name and path):
        raise UserError(f'checkpoint {filename!r} must be {_HUB}ORG/NAME/FILE')
    try:
        import huggingface_hub
    except ImportError as error:
        raise UserError(
            f'checkpoint {filename!r} needs huggingface_hub: pip install aft_mm[hub]'
        ) from error
    try:
        file = Path(
            huggingface_hub.hf_hub_download(f'{org}/{name}', path, revision=revision or None)
        )
    except (OSError, ValueError) as error:  # no network, no such file; no such name
        reason = str(error).strip().partition('\n')[0]
        raise UserError(f'checkpoint {filename!r} cannot be downloaded: {reason}') from error
    if wanted:
        _check_hash(hashlib.sha256(file.read_bytes()).hexdigest(), wanted, filename)
    return file


def _split_hash(address: str) -> tuple[str, str]:
    """An address without ``#sha256=...``, and the digits behind it, '' if there are none.

    Raises:
        UserError: it ends in something else behind a #.
    """
    plain, mark, fragment = address.partition('#')
    digits = fragment.removeprefix(_FRAGMENT)
    if mark and (digits == fragment or not re.fullmatch('[0-9a-f]{64}', digits)):
        raise UserError(
            f'checkpoint {address!r} must end in #{_FRAGMENT} and 64 digits from 0 to '
            'f, or have no #'
        )
    return plain, digits


def _check_hash(digest: str, wanted: str, address: str) -> None:
    if not digest.startswith(wanted):
        raise UserError(
            f'checkpoint {address!r} is refused: its sha256 begins with {digest[:8]}, '
            f'but the address says {wanted[:8]}'
        )


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
    """Write what an address holds to ``path``, whole and with the hash it names, or nothing."""
    plain, wanted = _split_hash(address)
    named = _HASH.search(urlparse(plain).path)
    digest, num_bytes = hashlib.sha256(), 0
    with urllib.request.urlopen(plain, timeout=_TIMEOUT) as source, write_whole(path) as file:
        while block := source.read(2**20):
            file.write(block)
            digest.update(block)
            num_bytes += len(block)
        announced = source.headers.get('Content-Length')
        if announced is not None and num_bytes != int(announced):
            raise OSError(f'{num_bytes} of {announced} bytes came')
        for digits in (wanted, named and named.group(1)):
            if digits:
                _check_hash(digest.hexdigest(), digits, address)


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
    raise UserError(
        f'checkpoint {filename!r} is on a host that serves no more; give a file or an http address'
    )


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
    _HUB: _without_program(load_from_hub),
    ('torchvision://', 'modelzoo://'): _without_program(load_from_torchvision),
    ('open-mmlab://', 'openmmlab://', 'mmcls://'): load_from_openmmlab,
}
