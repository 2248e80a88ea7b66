"""The two formats of torch.save, read without torch.load.

Since torch 1.6 a file is a zip archive, ``NAME/data.pkl`` beside one record ``NAME/data/KEY`` per
storage; before, it was four pickles, a list of keys and the storages one after the other.
"""

import io
import os
import struct
import sys
import zipfile
from pickle import UnpicklingError
from typing import IO, Any

import torch
from torch import Tensor

from .notes import NoteTaker
from .values import NAMES, Builder, storage_dtype

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
# Of the file's size: two sets of weights and the averages of both are stored once each, and tied
# weights are named a few times.
_TIMES = 8


def read_archive(path: str, map_location: Any = None) -> Any:
    """What torch.save wrote into a file: tensors, plain values and mmengine's log histories.

    Every record is compared with the checksum that the archive has of it.

    Args:
        path: Of the file.
        map_location: The device of the tensors, by default the CPU.

    Raises:
        Refused: the file names a function or class that no checkpoint needs.
        UnpicklingError, zipfile.BadZipFile, EOFError, ...: it is damaged or none of torch.save.
    """
    device = torch.device('cpu' if map_location is None else map_location)
    limit = _TIMES * os.path.getsize(path) + 2**20
    with open(path, 'rb') as file:
        if file.read(4) == b'PK\x03\x04':
            with zipfile.ZipFile(file) as archive:
                return _Zip(archive, os.path.getsize(path), device).load(limit)
        file.seek(0)
        return _Legacy(file, device).load(limit)


class _Zip:
    """An archive of torch 1.6 or later."""

    def __init__(self, archive: zipfile.ZipFile, size: int, device: torch.device) -> None:
        records = archive.infolist()
        # Torch stores; what is compressed, or lies in the file twice, can be larger than the file.
        if (
            any(
                record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1
                for record in records
            )
            or sum(record.file_size for record in records) > size
        ):
            raise UnpicklingError('its records are compressed or overlap')
        self.archive = archive
        self.device = device
        self.names = archive.NameToInfo
        roots = [name.removesuffix('data.pkl') for name in self.names if name.endswith('/data.pkl')]
        if len(roots) != 1 or f'{roots[0]}constants.pkl' in self.names:
            raise UnpicklingError('it is a zip archive, but none of torch.save')
        self.root = roots[0]
        order = f'{self.root}byteorder'
        if order in self.names and archive.read(order).decode() != sys.byteorder:
            raise UnpicklingError('its numbers have another byte order than this machine')
        self.storages: dict[str, Tensor] = {}

    def load(self, limit: int) -> Any:
        pickle = io.BytesIO(self.archive.read(f'{self.root}data.pkl'))
        return Builder(self.read_storage, limit).build(NoteTaker(pickle, NAMES).load())

    def read_storage(self, kind: Any, key: str, location: str, num_elements: int) -> Tensor:
        if key not in self.storages:
            record = self.names[f'{self.root}data/{key}']
            if record.file_size != num_elements * storage_dtype(kind).itemsize:
                raise UnpicklingError(f'storage {key} has another size than announced')
            storage = torch.empty(record.file_size, dtype=torch.uint8)
            with self.archive.open(record) as source:
                _fill(storage, source)
                source.read(1)  # at the end of a record its checksum is looked at
            self.storages[key] = storage.to(self.device)
        return self.storages[key]


class _Legacy:
    """A file of torch before 1.6."""

    def __init__(self, file: io.BufferedReader, device: torch.device) -> None:
        self.file = file
        self.device = device
        self.storages: dict[str, Tensor] = {}

    def load(self, limit: int) -> Any:
        magic, protocol, system = (NoteTaker(self.file, NAMES).load() for _ in range(3))
        if magic != _LEGACY_MAGIC or protocol != 1001:
            raise UnpicklingError('it does not begin as a file of torch.save')
        if system.get('little_endian') is not (sys.byteorder == 'little'):
            raise UnpicklingError('its numbers have another byte order than this machine')
        taker = NoteTaker(self.file, NAMES)
        notes = taker.load()
        kinds = {call.args[1]: call.args[0] for call in taker.storages}
        for key in NoteTaker(self.file, NAMES).load():
            (num_elements,) = struct.unpack('<q', self.file.read(8))
            num_bytes = num_elements * storage_dtype(kinds[key]).itemsize
            if not 0 <= num_bytes <= os.fstat(self.file.fileno()).st_size - self.file.tell():
                raise EOFError('a storage is longer than the file')
            storage = torch.empty(num_bytes, dtype=torch.uint8)
            _fill(storage, self.file)
            self.storages[key] = storage.to(self.device)
        return Builder(self.read_storage, limit).build(notes)

    def read_storage(
        self, kind: Any, key: str, location: str, num_elements: int, view: Any = None
    ) -> Tensor:
        if view is not None:
            raise UnpicklingError('a storage is part of another one')
        return self.storages[key]


def _fill(storage: Tensor, source: IO[bytes]) -> None:
    """Read as many bytes as ``storage`` holds.

    Raises:
        EOFError: there are fewer.
    """
    rest = memoryview(storage.numpy())
    while len(rest):
        num_bytes = source.readinto(rest[: 2**24])  # type: ignore[attr-defined]
        if not num_bytes:
            raise EOFError('a storage ends before its end')
        rest = rest[num_bytes:]
