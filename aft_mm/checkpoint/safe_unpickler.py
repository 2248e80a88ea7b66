"""Read torch.save files without executing their pickle.

Stock OpenMMLab checkpoints hold numpy values, log histories and scheduler methods, which
``torch.load(weights_only=True)`` refuses. So :class:`RecordingUnpickler` calls nothing and records
names and calls, from which :class:`ObjectBuilder` builds tensors, arrays and plain values;
everything else is refused.

``weights_only=True`` inside of ``safe_globals`` (torch 2.11) would lose promises of SECURITY.md:
its calls cannot be bounded (``bytearray(10**10)``), a key of nested tuples ends the process, and
checksums are not verified.
"""

import io
import math
import os
import pickle
import re
import struct
import sys
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pickle import UnpicklingError
from typing import IO, Any, ClassVar

import numpy as np
import torch
from mmengine.logging import HistoryBuffer
from mmengine.optim.scheduler import OneCycleParamScheduler
from torch import Tensor

# The opcodes that torch.save (protocol 2) writes.
_OPCODES = [
    getattr(pickle, name)
    for name in (
        'PROTO STOP GLOBAL BINPERSID MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT '
        'BINUNICODE SHORT_BINSTRING EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS '
        'EMPTY_DICT BINPUT LONG_BINPUT BINGET LONG_BINGET'
    ).split()
]
_KEYS = (str, int, float, bytes, type(None))


class Refused(UnpicklingError):  # noqa: N818 - it is about the file
    """The file asks for a function or class that no checkpoint needs; the message names it."""


@dataclass(slots=True, eq=False)
class Name:
    """A global that the pickle names, such as ``torch._utils._rebuild_tensor_v2``."""

    path: str

    def __repr__(self) -> str:
        return self.path


@dataclass(slots=True, eq=False)
class RecordedCall:
    """A call that the pickle asks for, with the items and the state it sets on the result."""

    name: str
    args: tuple
    items: dict[Any, Any] = field(default_factory=dict)
    state: Any = None

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def __repr__(self) -> str:
        return f'{self.name}(...)'


class RecordingUnpickler(pickle._Unpickler):
    """Reads a pickle with the opcodes of torch.save and records its calls.

    Raises:
        Refused: The pickle uses a name that is not among `names`.
        UnpicklingError: It makes another kind of call, or sets another state than that of a call.
    """

    stack: list[Any]  # set by the base class
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: io.BufferedIOBase, names: Collection[str]) -> None:
        super().__init__(file)
        self.names = names
        self.storages: list[RecordedCall] = []  # referenced by the pickle

    def find_class(self, module: str, name: str) -> Name:
        # Protocol 2 writes Python 2's name for builtins.
        path = f'{module}.{name}'.replace('__builtin__.', 'builtins.')
        if path not in self.names:
            raise Refused(path.removeprefix('builtins.'))
        return Name(path)

    def persistent_load(self, pid: Any) -> RecordedCall:
        if not (isinstance(pid, tuple) and len(pid) > 4 and pid[0] == 'storage'):
            raise UnpicklingError(f'{pid!r:.100} is not a storage')
        self.storages.append(RecordedCall('storage', pid[1:]))
        return self.storages[-1]

    def load_call(self) -> None:
        args, name = self.stack.pop(), self.stack[-1]
        if type(name) is not Name or type(args) is not tuple:
            raise UnpicklingError(f'a {type(name).__name__} is called')
        self.stack[-1] = RecordedCall(name.path, args)

    def load_state(self) -> None:
        state, call = self.stack.pop(), self.stack[-1]
        if type(call) is not RecordedCall or call.state is not None:
            raise UnpicklingError(f'a {type(call).__name__} gets a state')
        call.state = state

    def load_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set(key, value)

    def load_items(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._set(key, value)

    def _set(self, key: Any, value: Any) -> None:
        # Hashing a deeply nested tuple overflows the C stack.
        if not all(isinstance(part, _KEYS) for part in (key if type(key) is tuple else (key,))):
            raise UnpicklingError(f'a {type(key).__name__} is used as a key')
        if type(self.stack[-1]) not in (dict, RecordedCall):
            raise UnpicklingError(f'a {type(self.stack[-1]).__name__} gets an entry')
        self.stack[-1][key] = value

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **{code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES},
        pickle.REDUCE[0]: load_call,
        pickle.NEWOBJ[0]: load_call,
        pickle.BUILD[0]: load_state,
        pickle.SETITEM[0]: load_item,
        pickle.SETITEMS[0]: load_items,
    }


DTYPES = {
    f'torch.{name}': getattr(torch, name)
    for name in (
        'float16 float32 float64 bfloat16 uint8 int8 int16 int32 int64 uint16 uint32 uint64 bool '
        'complex64 complex128 float8_e4m3fn float8_e5m2'
    ).split()
}
STORAGES = {
    f'torch.{name}Storage': dtype
    for name, dtype in dict(
        Half=torch.float16,
        Float=torch.float32,
        Double=torch.float64,
        BFloat16=torch.bfloat16,
        Byte=torch.uint8,
        Char=torch.int8,
        Short=torch.int16,
        Int=torch.int32,
        Long=torch.int64,
        Bool=torch.bool,
        ComplexFloat=torch.complex64,
        ComplexDouble=torch.complex128,
    ).items()
}
UNTYPED = 'torch.storage.UntypedStorage'
_HISTORY = 'mmengine.logging.history_buffer.HistoryBuffer'
_ONE_CYCLE = 'mmengine.optim.scheduler.param_scheduler.OneCycleParamScheduler'
# All that a checkpoint may read with getattr.
_ATTRIBUTES = {
    **{
        (_HISTORY, name): getattr(HistoryBuffer, name) for name in ('min', 'max', 'mean', 'current')
    },
    **{
        (_ONE_CYCLE, name): getattr(OneCycleParamScheduler, name)
        for name in ('_annealing_cos', '_annealing_linear')
    },
}
# No objects, structured types or dates.
_NUMPY_CODE = re.compile(r'b1|[iu][1248]|f[248]|c8|c16|U\d{1,6}')


def storage_dtype(name: Any) -> torch.dtype:
    if type(name) is not Name or name.path not in (*STORAGES, UNTYPED):
        raise UnpicklingError(f'{name!r:.100} is not a storage class')
    return STORAGES.get(name.path, torch.uint8)


class ObjectBuilder:
    """Builds values from the records of :class:`RecordingUnpickler`.

    Args:
        read_storage: Returns a storage as a uint8 tensor, given torch's persistent id.
        limit: Maximum bytes of all values.
    """

    def __init__(self, read_storage: Callable[..., Tensor], limit: int) -> None:
        self.read_storage = read_storage
        self.left = limit
        self.built: dict[int, tuple[Any, Any]] = {}  # by id of the record, which is kept alive

    def build(self, record: Any) -> Any:
        """Return the value of a record; a record used twice gives the same object."""
        if record is None or isinstance(record, (bool, int, float, str, bytes)):
            return record
        if id(record) not in self.built:
            self.built[id(record)] = record, self  # being built
            self.built[id(record)] = record, self._build(record)
        value = self.built[id(record)][1]
        if value is self:
            raise UnpicklingError(f'a {type(record).__name__} holds itself')
        return value

    def _build(self, record: Any) -> Any:
        if isinstance(record, (list, tuple)):
            return type(record)(map(self.build, record))
        if isinstance(record, dict):
            return {key: self.build(value) for key, value in record.items()}
        if isinstance(record, Name):
            if record.path not in DTYPES:
                raise Refused(record.path)
            return DTYPES[record.path]
        if record.name in _OBJECTS:
            return _OBJECTS[record.name](self, record)
        if record.name not in _CALLS or record.items or record.state is not None:
            raise Refused(record.name)
        return _CALLS[record.name](self, *record.args)

    def spend(self, num_bytes: int) -> None:
        self.left -= num_bytes
        if self.left < 0:
            raise UnpicklingError('its values would take many times the memory of the file')

    # Each builder takes the arguments of the function it replaces.

    def ordered_dict(self, record: RecordedCall) -> OrderedDict:
        value = OrderedDict(*map(self.build, record.args))
        value.update((key, self.build(item)) for key, item in record.items.items())
        if isinstance(record.state, dict) and '_metadata' in record.state:
            value._metadata = self.build(record.state['_metadata'])  # type: ignore[attr-defined]
        return value

    def encode(self, text: str, encoding: str) -> bytes:
        if encoding != 'latin1':
            raise Refused(f'_codecs.encode(..., {encoding!r:.40})')
        self.spend(len(text))
        return text.encode('latin1')

    def attribute(self, owner: Any, name: Any) -> Any:
        if type(owner) is not Name or (owner.path, name) not in _ATTRIBUTES:
            raise Refused(f'getattr({owner!r:.100}, {name!r:.100})')
        return _ATTRIBUTES[owner.path, name]

    def tensor(
        self,
        storage: Any,
        offset: int,
        size: tuple,
        stride: tuple,
        requires_grad: bool = False,
        hooks: Any = None,
        metadata: Any = None,
        dtype: Any = None,
    ) -> Tensor:
        if type(storage) is not RecordedCall or storage.name != 'storage' or metadata:
            raise UnpicklingError('a tensor has no storage of numbers')
        kind = storage_dtype(storage.args[0]) if dtype is None else self.build(dtype)
        size, stride = self.build(size), self.build(stride)
        self.spend(math.prod(size) * kind.itemsize)
        source = self.read_storage(*storage.args).untyped_storage()
        empty = torch.empty(0, dtype=kind, device=source.device)
        # Torch refuses ranges outside of the storage.
        return empty.set_(source, offset, size, stride).requires_grad_(bool(requires_grad))

    def parameter(self, data: Any, requires_grad: bool, hooks: Any = None) -> torch.nn.Parameter:
        return torch.nn.Parameter(self.build(data), bool(requires_grad))

    def dtype(self, record: Any) -> np.dtype:
        if type(record) is not RecordedCall or record.name != 'numpy.dtype':
            raise UnpicklingError('an array has no dtype')
        code, state = record.args[0], record.state
        plain = (
            isinstance(code, str)
            and _NUMPY_CODE.fullmatch(code)
            and isinstance(state, tuple)
            and len(state) == 8
            and state[0] == 3
            and state[1] in ('<', '>', '|', '=')
            and state[2:5] == (None, None, None)
        )
        dtype = np.dtype(code) if plain else None
        if dtype is None or state[5] not in (-1, dtype.itemsize) or state[7] not in (0, 8):
            raise Refused(f'numpy.dtype({code!r:.40})')
        return dtype.newbyteorder(state[1])

    def array(self, record: RecordedCall) -> np.ndarray:
        if not (isinstance(record.state, tuple) and len(record.state) == 5):
            raise Refused('numpy.ndarray without plain data')
        _, shape, dtype, columns_first, data = record.state
        dtype, data = self.dtype(dtype), self.build(data)
        if (
            not isinstance(data, bytes)
            or not (isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape))
            or (math.prod(shape) * dtype.itemsize != len(data))
        ):
            raise Refused(f'numpy.ndarray of {shape!r:.60} without its data')
        self.spend(len(data))
        values = np.frombuffer(data, dtype) if dtype.itemsize else np.empty(0, dtype)
        return values.reshape(shape, order='F' if columns_first else 'C').copy('K')

    def scalar(self, dtype: Any, data: Any) -> np.generic:
        dtype, data = self.dtype(dtype), self.build(data)
        if not isinstance(data, bytes) or not 0 < dtype.itemsize == len(data):
            raise Refused(f'a numpy scalar of {dtype} without its data')
        return np.frombuffer(data, dtype)[0]

    def history(self, record: RecordedCall) -> HistoryBuffer:
        state = record.state if isinstance(record.state, dict) else {}
        self.build(state.get('statistics_methods'))  # refused unless mmengine's own
        return history_buffer(
            self.build(state.get('_log_history')),
            self.build(state.get('_count_history')),
            state.get('max_length'),
        )


def history_buffer(log_history: Any, count_history: Any, max_length: Any) -> HistoryBuffer:
    """Build mmengine's history of a scalar from two rows of numbers, or raise an UnpicklingError."""
    rows = [np.asarray(row) for row in (log_history, count_history)]
    if (
        any(row.ndim != 1 or row.dtype.kind not in 'fiu' for row in rows)
        or len(rows[0]) != len(rows[1])
        or type(max_length) is not int
        or not len(rows[0]) <= max_length
    ):
        raise UnpicklingError('a log history does not consist of numbers')
    return HistoryBuffer(*rows, max_length=max_length)


_MULTIARRAY = [f'numpy.{core}.multiarray' for core in ('core', '_core')]  # of numpy 1 and 2
# The whole record, if the result is changed after the call.
_OBJECTS: dict[str, Callable[[ObjectBuilder, RecordedCall], Any]] = {
    'collections.OrderedDict': ObjectBuilder.ordered_dict,
    _HISTORY: ObjectBuilder.history,
    **{f'{module}._reconstruct': ObjectBuilder.array for module in _MULTIARRAY},
}
_CALLS: dict[str, Callable[..., Any]] = {
    'collections.Counter': lambda builder, counts=(): Counter(builder.build(counts)),
    'builtins.set': lambda builder, items=(): set(builder.build(items)),
    'builtins.bytes': lambda builder: b'',
    'builtins.getattr': ObjectBuilder.attribute,
    '_codecs.encode': ObjectBuilder.encode,
    'torch.Size': lambda builder, size: torch.Size(builder.build(size)),
    'torch.device': lambda builder, *args: torch.device(*args),
    'torch._utils._rebuild_tensor': ObjectBuilder.tensor,
    'torch._utils._rebuild_tensor_v2': ObjectBuilder.tensor,
    # Of torch, dtype comes before the metadata.
    'torch._utils._rebuild_tensor_v3': lambda builder, *args: builder.tensor(
        *args[:6], *args[7:], dtype=args[6]
    ),
    'torch._utils._rebuild_parameter': ObjectBuilder.parameter,
    **{f'{module}.scalar': ObjectBuilder.scalar for module in _MULTIARRAY},
}
#: All names that a pickle may use.
NAMES = {
    *_OBJECTS,
    *_CALLS,
    *DTYPES,
    *STORAGES,
    UNTYPED,
    'numpy.dtype',
    'numpy.ndarray',
    _ONE_CYCLE,
}


_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
# Memory limit over file size: tied weights refer to the same bytes a few times.
_MEMORY_FACTOR = 8


def read_archive(path: str, map_location: Any = None) -> Any:
    """Read tensors, plain values and mmengine's log histories from a file of torch.save.

    Raises:
        Refused: The file names a function or class that no checkpoint needs.
        UnpicklingError, zipfile.BadZipFile, EOFError, ...: The file is damaged or of another kind.
    """
    device = torch.device('cpu' if map_location is None else map_location)
    size = os.path.getsize(path)
    limit = _MEMORY_FACTOR * size + 2**20
    with open(path, 'rb') as file:
        if file.read(4) == b'PK\x03\x04':
            with zipfile.ZipFile(file) as archive:
                return _read_zip(archive, size, device, limit)
        file.seek(0)
        return _read_legacy(file, size, device, limit)


def _read_zip(archive: zipfile.ZipFile, size: int, device: torch.device, limit: int) -> Any:
    records = archive.infolist()
    # Compressed or overlapping records could expand without limit.
    packed = any(x.compress_type != zipfile.ZIP_STORED or x.flag_bits & 1 for x in records)
    if packed or sum(record.file_size for record in records) > size:
        raise UnpicklingError('its records are compressed or overlap')
    names = archive.NameToInfo
    roots = [name.removesuffix('data.pkl') for name in names if name.endswith('/data.pkl')]
    if len(roots) != 1 or f'{roots[0]}constants.pkl' in names:
        raise UnpicklingError('it is a zip archive, but not one of torch.save')
    root = roots[0]
    order = f'{root}byteorder'
    if order in names and archive.read(order).decode() != sys.byteorder:
        raise UnpicklingError('its numbers have another byte order than this machine')
    storages: dict[str, Tensor] = {}

    def read_storage(kind: Any, key: str, location: str, num_elements: int) -> Tensor:
        if key not in storages:
            record = names[f'{root}data/{key}']
            if record.file_size != num_elements * storage_dtype(kind).itemsize:
                raise UnpicklingError(f'storage {key} does not have the announced size')
            storage = torch.empty(record.file_size, dtype=torch.uint8)
            with archive.open(record) as source:
                _fill(storage, source)
                source.read(1)  # zipfile verifies the checksum at the end
            storages[key] = storage.to(device)
        return storages[key]

    content = io.BytesIO(archive.read(f'{root}data.pkl'))
    return ObjectBuilder(read_storage, limit).build(RecordingUnpickler(content, NAMES).load())


def _read_legacy(file: io.BufferedReader, size: int, device: torch.device, limit: int) -> Any:
    """Read a file of torch before 1.6: four pickles, a list of keys and the storages."""
    magic, protocol, system = (RecordingUnpickler(file, NAMES).load() for _ in range(3))
    if magic != _LEGACY_MAGIC or protocol != 1001:
        raise UnpicklingError('it does not begin like a file of torch.save')
    if system.get('little_endian') is not (sys.byteorder == 'little'):
        raise UnpicklingError('its numbers have another byte order than this machine')
    unpickler = RecordingUnpickler(file, NAMES)
    records = unpickler.load()
    kinds = {call.args[1]: call.args[0] for call in unpickler.storages}
    storages: dict[str, Tensor] = {}
    for key in RecordingUnpickler(file, NAMES).load():
        (num_elements,) = struct.unpack('<q', file.read(8))
        num_bytes = num_elements * storage_dtype(kinds[key]).itemsize
        if not 0 <= num_bytes <= size - file.tell():
            raise EOFError('a storage is longer than the file')
        storage = torch.empty(num_bytes, dtype=torch.uint8)
        _fill(storage, file)
        storages[key] = storage.to(device)

    def read_storage(
        kind: Any, key: str, location: str, num_elements: int, view: Any = None
    ) -> Tensor:
        if view is not None:
            raise UnpicklingError('a storage is part of another one')
        return storages[key]

    return ObjectBuilder(read_storage, limit).build(records)


def _fill(storage: Tensor, source: IO[bytes]) -> None:
    rest = storage.numpy().data
    while len(rest):
        num_bytes = source.readinto(rest[: 2**24])  # type: ignore[attr-defined]
        if not num_bytes:
            raise EOFError('a storage is truncated')
        rest = rest[num_bytes:]
