"""What a checkpoint may hold, built from the notes of its pickle."""

import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from mmengine.logging import HistoryBuffer
from mmengine.optim.scheduler import OneCycleParamScheduler
from torch import Tensor

from .notes import Call, Name, Refused

DTYPES = {
    f'torch.{name}': getattr(torch, name)
    for name in (
        'float16',
        'float32',
        'float64',
        'bfloat16',
        'uint8',
        'int8',
        'int16',
        'int32',
        'int64',
        'uint16',
        'uint32',
        'uint64',
        'bool',
        'complex64',
        'complex128',
        'float8_e4m3fn',
        'float8_e5m2',
    )
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
# The only attributes that a checkpoint may fetch.
_ATTRIBUTES = {
    **{
        (_HISTORY, name): getattr(HistoryBuffer, name) for name in ('min', 'max', 'mean', 'current')
    },
    **{
        (_ONE_CYCLE, name): getattr(OneCycleParamScheduler, name)
        for name in ('_annealing_cos', '_annealing_linear')
    },
}
# Numbers and text; no objects, no fields, no dates.
_NUMPY_CODE = re.compile(r'b1|[iu][1248]|f[248]|c8|c16|U\d{1,6}')


def storage_dtype(name: Any) -> torch.dtype:
    """The type of the elements of a storage class that a pickle names; uint8 if it has none."""
    if type(name) is not Name or name.path not in (*STORAGES, UNTYPED):
        raise UnpicklingError(f'{name!r:.100} is no storage class')
    return STORAGES.get(name.path, torch.uint8)


class Builder:
    """Builds the values that notes stand for.

    Args:
        read_storage: Gives the bytes of a storage, a uint8 tensor, from what follows the word
            ``'storage'`` in torch's persistent id.
        limit: Bytes that all tensors, arrays and byte strings may take together; a file can name
            the same bytes many times over.
    """

    def __init__(self, read_storage: Callable[..., Tensor], limit: int) -> None:
        self.read_storage = read_storage
        self.left = limit
        self.built: dict[int, tuple[Any, Any]] = {}  # by id of the note, which is kept alive

    def build(self, note: Any) -> Any:
        """The value; what stands in two places of the file is one object in both.

        Raises:
            Refused: a call is none that a checkpoint needs.
            UnpicklingError: a note is part of itself, or the values take too much memory.
        """
        if note is None or isinstance(note, (bool, int, float, str, bytes)):
            return note
        if id(note) not in self.built:
            self.built[id(note)] = note, self  # in the making
            self.built[id(note)] = note, self._build(note)
        value = self.built[id(note)][1]
        if value is self:
            raise UnpicklingError(f'a {type(note).__name__} holds itself')
        return value

    def _build(self, note: Any) -> Any:
        if isinstance(note, (list, tuple)):
            return type(note)(map(self.build, note))
        if isinstance(note, dict):
            return {key: self.build(value) for key, value in note.items()}
        if isinstance(note, Name):
            if note.path not in DTYPES:
                raise Refused(note.path)
            return DTYPES[note.path]
        if note.name in _OBJECTS:
            return _OBJECTS[note.name](self, note)
        if note.name not in _CALLS or note.items or note.state is not None:
            raise Refused(note.name)
        return _CALLS[note.name](self, *note.args)

    def spend(self, num_bytes: int) -> None:
        """Raise an UnpicklingError if so many more bytes are above the limit."""
        self.left -= num_bytes
        if self.left < 0:
            raise UnpicklingError('its values would take many times the memory of the file')

    # -- builders: the arguments of each are those of the function that it stands for --

    def ordered_dict(self, note: Call) -> OrderedDict:
        value = OrderedDict(*map(self.build, note.args))
        value.update((key, self.build(item)) for key, item in note.items.items())
        if isinstance(note.state, dict) and '_metadata' in note.state:
            value._metadata = self.build(note.state['_metadata'])  # type: ignore[attr-defined]
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
    ) -> Tensor:
        if type(storage) is not Call or storage.name != 'storage' or metadata:
            raise UnpicklingError('a tensor has no storage of numbers')
        return self._tensor(
            storage, storage_dtype(storage.args[0]), offset, size, stride, requires_grad
        )

    def tensor_of_type(
        self,
        storage: Any,
        offset: int,
        size: tuple,
        stride: tuple,
        requires_grad: bool,
        hooks: Any,
        dtype: Any,
        metadata: Any = None,
    ) -> Tensor:
        if type(storage) is not Call or storage.name != 'storage' or metadata:
            raise UnpicklingError('a tensor has no storage of numbers')
        return self._tensor(storage, self.build(dtype), offset, size, stride, requires_grad)

    def _tensor(
        self,
        storage: Call,
        dtype: torch.dtype,
        offset: int,
        size: Any,
        stride: Any,
        requires_grad: bool,
    ) -> Tensor:
        size, stride = self.build(size), self.build(stride)
        self.spend(math.prod(size) * dtype.itemsize)
        source = self.read_storage(*storage.args).untyped_storage()
        empty = torch.empty(0, dtype=dtype, device=source.device)
        # Torch refuses what lies outside of the storage.
        return empty.set_(source, offset, size, stride).requires_grad_(bool(requires_grad))

    def parameter(self, data: Any, requires_grad: bool, hooks: Any = None) -> torch.nn.Parameter:
        return torch.nn.Parameter(self.build(data), bool(requires_grad))

    def dtype(self, note: Any) -> np.dtype:
        """A numpy type: ``dtype('f8', False, True)``, then its byte order and no fields."""
        if type(note) is not Call or note.name != 'numpy.dtype':
            raise UnpicklingError('an array has no type')
        code, state = note.args[0], note.state
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

    def array(self, note: Call) -> np.ndarray:
        """``_reconstruct(ndarray, (0,), b'b')``, then (1, shape, type, column order, bytes)."""
        if not (isinstance(note.state, tuple) and len(note.state) == 5):
            raise Refused('numpy.ndarray without plain data')
        _, shape, dtype, columns_first, data = note.state
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

    def history(self, note: Call) -> HistoryBuffer:
        state = note.state if isinstance(note.state, dict) else {}
        self.build(state.get('statistics_methods'))  # mmengine's own, or refused
        return history(
            self.build(state.get('_log_history')),
            self.build(state.get('_count_history')),
            state.get('max_length'),
        )


def history(log_history: Any, count_history: Any, max_length: Any) -> HistoryBuffer:
    """mmengine's history of a scalar, of two rows of numbers.

    Raises:
        UnpicklingError: these are none.
    """
    rows = [np.asarray(row) for row in (log_history, count_history)]
    if (
        any(row.ndim != 1 or row.dtype.kind not in 'fiu' for row in rows)
        or len(rows[0]) != len(rows[1])
        or type(max_length) is not int
        or not len(rows[0]) <= max_length
    ):
        raise UnpicklingError('a log history is none of numbers')
    return HistoryBuffer(*rows, max_length=max_length)


_MULTIARRAY = [f'numpy.{core}.multiarray' for core in ('core', '_core')]  # of numpy 1 and 2
# Notes that are changed after the call are handed on whole.
_OBJECTS: dict[str, Callable[[Builder, Call], Any]] = {
    'collections.OrderedDict': Builder.ordered_dict,
    _HISTORY: Builder.history,
    **{f'{module}._reconstruct': Builder.array for module in _MULTIARRAY},
}
_CALLS: dict[str, Callable[..., Any]] = {
    'collections.Counter': lambda builder, counts=(): Counter(builder.build(counts)),
    'builtins.set': lambda builder, items=(): set(builder.build(items)),
    'builtins.bytes': lambda builder: b'',
    'builtins.getattr': Builder.attribute,
    '_codecs.encode': Builder.encode,
    'torch.Size': lambda builder, size: torch.Size(builder.build(size)),
    'torch.device': lambda builder, *args: torch.device(*args),
    'torch._utils._rebuild_tensor': Builder.tensor,
    'torch._utils._rebuild_tensor_v2': Builder.tensor,
    'torch._utils._rebuild_tensor_v3': Builder.tensor_of_type,
    'torch._utils._rebuild_parameter': Builder.parameter,
    **{f'{module}.scalar': Builder.scalar for module in _MULTIARRAY},
}
#: All that a pickle may mention.
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
