"""Pickles of checkpoints, read without doing what they say.

A pickle is a program: it names functions and calls them. Here a name is a :class:`Name` and a call
leaves a :class:`Call`, a note of what was called with what; ``values.py`` builds from these notes
what a checkpoint may hold, by our own code.
"""

import io
import pickle
from collections.abc import Callable, Collection
from pickle import UnpicklingError
from typing import Any, ClassVar

# What torch.save (protocol 2) writes; the rest of the language is not understood.
_OPCODES = (
    pickle.PROTO,
    pickle.STOP,
    pickle.GLOBAL,
    pickle.BINPERSID,
    pickle.MARK,
    pickle.NONE,
    pickle.NEWTRUE,
    pickle.NEWFALSE,
    pickle.BININT,
    pickle.BININT1,
    pickle.BININT2,
    pickle.LONG1,
    pickle.BINFLOAT,
    pickle.BINUNICODE,
    pickle.SHORT_BINSTRING,
    pickle.EMPTY_TUPLE,
    pickle.TUPLE,
    pickle.TUPLE1,
    pickle.TUPLE2,
    pickle.TUPLE3,
    pickle.EMPTY_LIST,
    pickle.APPEND,
    pickle.APPENDS,
    pickle.EMPTY_DICT,
    pickle.BINPUT,
    pickle.LONG_BINPUT,
    pickle.BINGET,
    pickle.LONG_BINGET,
)
_KEYS = (str, int, float, bytes, type(None))


class Refused(UnpicklingError):  # noqa: N818 - it is about the file
    """The file asks for what no checkpoint needs; the message is its name."""


class Name:
    """A name that a pickle mentions, such as ``torch._utils._rebuild_tensor_v2``."""

    __slots__ = ('path',)

    def __init__(self, path: str) -> None:
        self.path = path

    def __repr__(self) -> str:
        return self.path


class Call:
    """A call that a pickle asks for, and what it puts into the result.

    Args:
        name: Of the function.
        args: Its arguments, among them further notes.
    """

    __slots__ = ('name', 'args', 'items', 'state')

    def __init__(self, name: str, args: tuple) -> None:
        self.name = name
        self.args = args
        self.items: dict[Any, Any] = {}
        self.state: Any = None

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def __repr__(self) -> str:
        return f'{self.name}(...)'


class NoteTaker(pickle._Unpickler):
    """Reads a pickle to the notes of it.

    The unpickler in Python has a table of its opcodes, of which this one keeps those of torch.save.

    Args:
        file: Where the pickle begins.
        names: The dotted names that it may mention.

    Raises:
        Refused: it mentions another one.
        UnpicklingError: it calls what is no name, or sets the state of what is no call.
    """

    stack: list[Any]  # the base class makes it
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: io.BufferedIOBase, names: Collection[str]) -> None:
        super().__init__(file)
        self.names = names
        self.storages: list[Call] = []  # that it refers to

    def find_class(self, module: str, name: str) -> Name:
        # Python 2's name, which protocol 2 uses, also of Python 3's functions.
        path = f'{module}.{name}'.replace('__builtin__.', 'builtins.')
        if path not in self.names:
            raise Refused(path.removeprefix('builtins.'))
        return Name(path)

    def persistent_load(self, pid: Any) -> Call:
        if not (isinstance(pid, tuple) and len(pid) > 4 and pid[0] == 'storage'):
            raise UnpicklingError(f'{pid!r:.100} is no storage')
        self.storages.append(Call('storage', pid[1:]))
        return self.storages[-1]

    def load_call(self) -> None:
        args, name = self.stack.pop(), self.stack[-1]
        if type(name) is not Name or type(args) is not tuple:
            raise UnpicklingError(f'a {type(name).__name__} is called')
        self.stack[-1] = Call(name.path, args)

    def load_state(self) -> None:
        state, call = self.stack.pop(), self.stack[-1]
        if type(call) is not Call or call.state is not None:
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
        # The hash of a tuple in a tuple in a tuple ... overflows the stack of C.
        if not all(isinstance(part, _KEYS) for part in (key if type(key) is tuple else (key,))):
            raise UnpicklingError(f'a {type(key).__name__} is the key of an entry')
        if type(self.stack[-1]) not in (dict, Call):
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
