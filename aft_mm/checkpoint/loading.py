"""Loaders for mmengine, and loading weights into a model."""

import hashlib
import http.client
import importlib.util
import os
import pickle
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from copy import copy
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlparse

import torch
from mmengine.dist import barrier, is_distributed
from mmengine.runner.checkpoint import get_torchvision_models
from rich.console import Console
from rich.progress import DownloadColumn, Progress
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from aft_mm.errors import UserError
from aft_mm.openmmlab import warn
from aft_mm.outputs import POINTER, write_whole

from .plain_types import restored_hub
from .safe_unpickler import Refused, read_archive
from .safetensors import SUFFIX, read_safetensors

# torch.hub's file names: NAME-<first digits of the sha256>.pth
_HASH = re.compile(r'-([0-9a-f]{8,64})\.\w+$')
# pip's addresses: ADDRESS#sha256=<all digits>
_FRAGMENT = 'sha256='
_HUB = 'hf://'
_MINI = 'mini://'
_MINIS = 'aft_mm_minis'
_SCHEMES = 'http', 'https'
_TIMEOUT = 60  # seconds without a byte
#: Bounds of a download, with their environment variables.
MAX_SECONDS = 'AFT_MM_DOWNLOAD_SECONDS', 3600
MAX_BYTES = 'AFT_MM_DOWNLOAD_BYTES', 20 * 10**9
#: Entry of a loaded checkpoint's meta with the text of the config of its training.
CONFIG_TEXT = 'config_text'
_BLOCK = 2**20  # bytes
_LONGEST_PATH = 4096


def _load(filename: str, map_location: Any) -> dict:
    try:
        read = read_safetensors if filename.endswith(SUFFIX) else read_archive
        checkpoint = read(filename, map_location)
        if isinstance(checkpoint, dict) and 'message_hub' in checkpoint:
            checkpoint['message_hub'] = restored_hub(checkpoint['message_hub'])
    except Refused as error:
        raise pickle.UnpicklingError(
            f'checkpoint {filename!r} is refused because it asks for {str(error):.200}, which is '
            'neither a weight nor the training state of mmengine'
        ) from error
    except Exception as error:  # parsers of damaged files raise anything
        if isinstance(error, OSError) and error.filename is not None:  # it cannot be opened
            raise
        reason = ' '.join(str(error).split())
        raise pickle.UnpicklingError(
            f'checkpoint {filename!r} is damaged or holds something other than weights and '
            f'training state ({type(error).__name__}: {reason:.200})'
        ) from error
    content = _unexpected(checkpoint)
    if content:
        raise pickle.UnpicklingError(f'checkpoint {filename!r} holds {content}')
    # mmengine's Runner.resume would execute this entry of old checkpoints.
    checkpoint.get('meta', {}).pop('config', None)
    return checkpoint


def _unexpected(checkpoint: Any) -> str:
    if not isinstance(checkpoint, dict):
        return f'a {type(checkpoint).__name__} instead of a dict'
    meta, weights = checkpoint.get('meta', {}), checkpoint.get('state_dict', {})
    if not isinstance(meta, dict):
        return f'a {type(meta).__name__} as meta instead of a dict'
    if not isinstance(weights, Mapping):
        return f'a {type(weights).__name__} as state_dict instead of tensors by name'
    for name, value in weights.items():
        if not isinstance(name, str):
            return f'a tensor in state_dict whose name is a {type(name).__name__}'
        if not isinstance(value, Tensor) and not name.endswith('_extra_state'):
            return f'a {type(value).__name__} in state_dict instead of the tensor {name:.100}'
    return ''


def load_from_local(filename: str, map_location: Any = None) -> dict:
    """Load weights and mmengine's training state from a checkpoint file.

    ``.safetensors`` is read as such, other files as those of torch.save, and of ``last_checkpoint``
    the file that it names. No code of the file is run, checksums are verified, and memory is
    limited by the file size.

    Args:
        map_location: Device of the tensors, by default the CPU.

    Returns:
        The checkpoint dict, whose ``meta`` may contain the text of the config, a program.

    Raises:
        FileNotFoundError: There is no such file.
        pickle.UnpicklingError: The file asks for other objects, is damaged, or holds no dict.
    """
    filename = os.path.expanduser(filename)
    origin = ''
    if os.path.basename(filename) == POINTER and os.path.isfile(filename):
        origin = f', named by {filename!r},'
        named = Path(filename).read_text(errors='replace')[:_LONGEST_PATH].strip()
        moved = os.path.join(os.path.dirname(filename), os.path.basename(named))
        filename = moved if os.path.isfile(moved) else named  # with its folder
    if not os.path.isfile(filename):
        raise FileNotFoundError(f'checkpoint {filename!r}{origin} does not exist')
    return _load(filename, map_location)


def load_from_http(filename: str, map_location: Any = None) -> dict:
    """Download a checkpoint into torch's hub folder and load it with :func:`load_from_local`.

    Its length must match the server's, and its sha256 ``ADDRESS#sha256=...`` or the digits in the
    file name, if given. SECURITY.md has the bounds.

    Raises:
        UserError: The download failed, or ``#`` is not followed by a sha256.
    """
    path = _first_on_machine(cached, filename)
    try:
        return _load(str(path), map_location)
    except pickle.UnpicklingError:
        path.unlink(missing_ok=True)  # the next try downloads it again
        raise


def _first_on_machine(download: Callable[[str], Path], address: str) -> Path:
    first = int(os.environ.get('LOCAL_RANK', 0)) == 0
    if is_distributed() and not first:
        barrier()
    try:
        return download(address)
    finally:  # the others wait also after an error
        if is_distributed() and first:
            barrier()


def load_from_hub(filename: str, map_location: Any = None) -> dict:
    """Load ``hf://ORG/NAME/FILE`` from the Hugging Face hub with :func:`load_from_local`.

    ``hf://ORG/NAME@REVISION/FILE`` selects a branch, tag or commit; ``#sha256=...`` is compared.

    Raises:
        UserError: huggingface_hub is missing, the address is malformed, or the download failed.
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
        _check_file(file, wanted, filename)
    return file


def load_from_minis(filename: str, map_location: Any = None) -> dict:
    """Load ``mini://FILE#sha256=...`` of the package aft_mm_minis with :func:`load_from_local`.

    Raises:
        UserError: The package or the file is missing, or the file has another hash.
    """
    address, wanted = _split_hash(filename)
    name = address.removeprefix(_MINI)
    if not wanted or os.path.basename(name) != name:
        raise UserError(f'checkpoint {filename!r} must be {_MINI}FILE#{_FRAGMENT}...')
    path = _minis_folder() / name
    if not path.is_file():
        raise UserError(f'checkpoint {name!r} is not in {str(path.parent)!r}')
    _check_file(path, wanted, filename)
    return _load(str(path), map_location)


def _minis_folder() -> Path:
    folder = Path(__file__).parents[2] / 'minis' / _MINIS
    if folder.is_dir():
        return folder
    spec = importlib.util.find_spec(_MINIS)
    if spec is None or spec.origin is None:
        raise UserError(
            f'the weights are in the package {_MINIS}, which is not installed: pip install ./minis in '
            f'a clone, or its wheel'
        )
    return Path(spec.origin).parent


def _check_file(path: Path, wanted: str, address: str) -> None:
    with path.open('rb') as file:
        digest = hashlib.file_digest(file, 'sha256').hexdigest()
    _check_hash(digest, wanted, address)


def _split_hash(address: str) -> tuple[str, str]:
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
    try:
        name = re.sub(r'[^\w.-]', '_', os.path.basename(urlparse(address).path), flags=re.ASCII)
        digits = hashlib.sha256(address.encode(errors='surrogateescape')).hexdigest()[:16]
        folder = Path(torch.hub.get_dir(), 'checkpoints')
        path = folder / f'{digits}_{name[-100:]}'
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _download(address, path)
    except UserError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: the address
        reason = ' '.join(str(error).split())
        raise UserError(
            f'checkpoint {address!r} cannot be downloaded: {reason or type(error).__name__:.200}'
        ) from error
    return path


def _download(address: str, path: Path) -> None:
    plain, wanted = _split_hash(address)
    if urlparse(plain).scheme not in _SCHEMES:
        raise UserError(f'checkpoint {address!r} must be an http or https address')
    named = _HASH.search(urlparse(plain).path)
    seconds, most = _bound(*MAX_SECONDS), _bound(*MAX_BYTES)
    for part in path.parent.glob(f'.{path.name}.*.part'):  # of killed downloads
        if time.time() - part.stat().st_mtime > seconds + _TIMEOUT:
            part.unlink(missing_ok=True)
    digest = hashlib.sha256()
    errors: list[Exception] = []
    console = Console(stderr=True)
    bar = Progress(
        *Progress.get_default_columns(),
        DownloadColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with write_whole(path) as file, bar:

        def receive() -> None:
            try:
                _receive(plain, most, file, digest, bar)
            except Exception as error:  # raised in the thread that waits
                errors.append(error)

        # A server can hold every call of http.client for hours with one byte per minute.
        thread = threading.Thread(target=receive, daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            raise TimeoutError(
                f'it takes more than {seconds:,} seconds, which {MAX_SECONDS[0]} allows'
            )
        if errors:
            raise errors[0]
        for digits in (wanted, named and named.group(1)):
            if digits:
                _check_hash(digest.hexdigest(), digits, address)


class _StayOnHTTP(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, request: Any, file: Any, code: Any, message: Any, headers: Any, address: str
    ) -> urllib.request.Request | None:
        if urlparse(address).scheme not in _SCHEMES:
            raise OSError(f'it redirects to {address[:80]!r}')
        return super().redirect_request(request, file, code, message, headers, address)


# torch.hub.download_url_to_file bounds neither time nor bytes, accepts a body that is cut, follows a
# redirect to ftp, and keeps the part of a killed download for ever.
def _receive(address: str, most: int, file: BinaryIO, digest: Any, bar: Progress) -> None:
    too_large = f'it has more than {most:,} bytes, which {MAX_BYTES[0]} allows'
    with urllib.request.build_opener(_StayOnHTTP).open(address, timeout=_TIMEOUT) as source:
        announced = source.headers.get('Content-Length')
        if announced is not None and not re.fullmatch('[0-9]{1,18}', announced):
            raise OSError(f'its Content-Length is {announced[:80]!r}')
        if announced is not None and int(announced) > most:
            raise OSError(too_large)
        task = bar.add_task('downloading', total=None if announced is None else int(announced))
        num_bytes = 0
        while block := source.read1(_BLOCK):
            file.write(block)
            digest.update(block)
            num_bytes += len(block)
            bar.update(task, completed=num_bytes)
            if num_bytes > most:
                raise OSError(too_large)
    if announced is not None and num_bytes != int(announced):
        raise OSError(f'{num_bytes} of {announced} bytes received')


def _bound(variable: str, default: int) -> int:
    text = os.environ.get(variable) or str(default)
    if not re.fullmatch('[0-9]{1,18}', text) or not int(text):
        raise UserError(f'{variable} must be an int, 1 or larger, got {text[:80]!r}')
    return int(text)


def load_from_torchvision(filename: str, map_location: Any = None) -> dict:
    """Load ``torchvision://NAME`` with :func:`load_from_http`; raise a UserError if there is none."""
    name = filename.partition('://')[2]
    addresses = get_torchvision_models()
    if name not in addresses:
        raise UserError(f'checkpoint {filename!r} is not one of torchvision')
    return load_from_http(addresses[name], map_location)


def load_from_openmmlab(filename: str, map_location: Any = None) -> dict:
    """Raise a :class:`UserError`: the host no longer exists."""
    raise UserError(
        f'checkpoint {filename!r} is on a host that no longer exists; give a file or an http address'
    )


LOADERS = {
    'local': load_from_local,
    'http': load_from_http,
    'hub': load_from_hub,
    'minis': load_from_minis,
    'torchvision': load_from_torchvision,
    'openmmlab': load_from_openmmlab,
    'mmcls': load_from_openmmlab,
}


def load_for_mmengine(kind: str, filename: str, map_location: Any = None) -> dict:
    """Load a checkpoint, the config text renamed that mmengine's inferencers would execute."""
    checkpoint = LOADERS[kind](filename, map_location)
    meta = checkpoint.get('meta', {})
    if isinstance(meta, dict):
        meta.pop(CONFIG_TEXT, None)  # only the loader writes it
        if 'cfg' in meta:
            meta[CONFIG_TEXT] = str(meta.pop('cfg'))
    return checkpoint


def load_weights(model: nn.Module, checkpoint: dict, name: str, strict: bool = True) -> list[str]:
    """Load the weights of a checkpoint into ``model``.

    The log warns about tensors that were interpolated, keep their initialisation because the shape
    differs, or have NaN or inf.

    Args:
        checkpoint: A checkpoint or state dict, as a loader returns it.
        name: Name of the model for the error message.
        strict: Require matching names and shapes.

    Returns:
        The names of interpolated tensors.

    Raises:
        UserError: The checkpoint does not fit the model.
    """
    weights = checkpoint.get('state_dict', checkpoint)
    if not isinstance(weights, dict) or not all(isinstance(key, str) for key in weights):
        raise UserError(
            'state_dict of the checkpoint must map names to tensors, got a '
            f'{type(weights).__name__} of something else'
        )
    weights = copy(weights)
    consume_prefix_in_state_dict_if_present(weights, 'module.')
    missing, unexpected, reshaped, uncopied = _copy(model, weights)
    if strict and (missing or unexpected or reshaped or uncopied):
        source = checkpoint.get('meta', {}).get('experiment_name', 'an unnamed run')
        raise UserError(
            f'the checkpoint (from {source}) does not fit the model of this config '
            f'({name}): {len(missing)} tensors are missing, '
            f'{len(unexpected)} unexpected and {len(reshaped)} of another shape'
            + (f'; {uncopied} cannot be copied' if uncopied else '')
        )
    state = model.state_dict()
    if reshaped:
        shapes = ', '.join(
            f'{key} {list(weights[key].shape)} -> {list(state[key].shape)}' for key in reshaped[:2]
        )
        more = f' and {len(reshaped) - 2} more' if len(reshaped) > 2 else ''
        warn(
            'tensors with another shape in the checkpoint keep their initialisation: '
            f'{shapes}{more}'
        )
    bad = [
        key
        for key, value in weights.items()
        if isinstance(value, Tensor)
        and value.is_floating_point()
        and value.dtype.itemsize > 1
        and not value.isfinite().all()
    ]
    if bad:
        warn(
            f'{len(bad)} of the {len(weights)} tensors of the checkpoint hold NaN or inf, the '
            f'first is {bad[0]}'
        )
    if reshaped or uncopied:  # mmengine loads again and logs every misfit
        return []
    resized = sorted(
        key for key in state.keys() & weights.keys() if state[key].shape != weights[key].shape
    )
    if resized:
        first = resized[0]
        warn(
            f'the checkpoint is interpolated to the sizes of this model: {first} from '
            f'{list(weights[first].shape)} to {list(state[first].shape)}, {len(resized)} in all'
        )
    return resized


def _copy(model: nn.Module, weights: Mapping) -> tuple:
    state = model.state_dict()
    reshaped: list[str] = []
    uncopied = 0
    # A layer may resize, rename or refuse a tensor.
    try:
        missing, unexpected = model.load_state_dict(weights, strict=False)
    except ValueError as error:
        raise UserError(str(error)) from error
    except RuntimeError as error:
        missing, unexpected = state.keys() - weights.keys(), weights.keys() - state.keys()
        reshaped = re.findall(r'size mismatch for (\S+):', str(error))
        uncopied = str(error).count('\n\t') - len(reshaped)
    # Torch would drop the imaginary part.
    uncopied += sum(
        weights[key].is_complex() != state[key].is_complex()
        for key in state.keys() & weights.keys()
        if isinstance(weights[key], Tensor)
    )
    return missing, unexpected, reshaped, uncopied
