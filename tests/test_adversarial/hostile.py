"""Malicious checkpoints and images, written by the tests."""

import os
import pickle
import struct
import zipfile
from collections import OrderedDict

import numpy as np
import torch
from mmengine.logging import HistoryBuffer

ADDRESS = 0x414243440000


class Call:
    """Pickles as a call of ``function`` with ``args``, then with a state."""

    def __init__(self, function, *args, state=None):
        self.parts = (function, args) if state is None else (function, args, state)

    def __reduce__(self):
        return self.parts


class Dtype:
    """Pickles as ``np.dtype(code)`` with any state."""

    def __init__(self, code, **changes):
        state = dict(
            version=3, order='<', subtype=None, names=None, fields=None, size=-1, align=-1, flags=0
        )
        self.call = np.dtype, (code, False, True), tuple({**state, **changes}.values())

    def __reduce__(self):
        return self.call


def array(state):
    """An array with any state: ``_reconstruct`` and the state."""
    return Call(np.empty(0).__reduce__()[0], np.ndarray, (0,), b'b', state=state)


def history(**state):
    """mmengine's history with a state of any kind."""
    return Call(HistoryBuffer, state=state)


POINTER = struct.pack('<Q', ADDRESS)
SCALAR = np.float64(0).__reduce__()[0]
#: Objects of numpy that the file builds itself, and calls that only look harmless.
OBJECTS = {
    'object array at an address': lambda: Call(np.ndarray, (1,), Call(np.dtype, 'O'), POINTER),
    'object array by its state': lambda: array((1, (1,), Dtype('O'), False, [1])),
    'object scalar': lambda: Call(SCALAR, Dtype('O'), POINTER),
    'object flags on numbers': lambda: array((1, (1,), Dtype('f8', flags=63), False, POINTER)),
    'fields of objects': lambda: array(
        (
            1,
            (1,),
            Dtype('V8', names=('a',), fields={'a': (np.dtype('O'), 0)}, size=8),
            False,
            POINTER,
        )
    ),
    'subtype of objects': lambda: array(
        (1, (1,), Dtype('V8', subtype=(np.dtype('O'), (1,)), size=8), False, POINTER)
    ),
    'elements of another size': lambda: array((1, (2**20,), Dtype('f8', size=1), False, b'1')),
    'more elements than bytes': lambda: array((1, (2**40,), Dtype('f8'), False, b'12345678')),
    'a negative shape': lambda: array((1, (-1, -1), Dtype('f8'), False, b'12345678')),
    'an array of a buffer': lambda: Call(np.ndarray, (10**9,), Call(np.dtype, 'f8')),
    'a scalar of too few bytes': lambda: Call(SCALAR, Dtype('f8'), b'1'),
    'a string of no bytes': lambda: Call(SCALAR, Dtype('U0'), b''),
    'a statistics method': lambda: history(
        _log_history=np.zeros(1),
        _count_history=np.zeros(1),
        max_length=9,
        statistics_methods={'mean': Call(getattr, HistoryBuffer, 'register_statistics')},
    ),
    'a history of text': lambda: history(
        _log_history=np.array(['a']), _count_history=np.zeros(1), max_length=9
    ),
    'eval': lambda: Call(eval, '1 + 1'),
    'os.system': lambda: Call(os.system, 'true'),
    'getattr of an allowed class': lambda: Call(getattr, np.ndarray, '__subclasses__'),
    'getattr of another method': lambda: Call(getattr, HistoryBuffer, 'register_statistics'),
    'getattr of a tensor': lambda: Call(getattr, torch.zeros(1), 'numpy'),
    # The builtins of these hold eval.
    'getattr of getattr': lambda: Call(getattr, Call(getattr, HistoryBuffer, 'min'), '__globals__'),
    'a bytearray': lambda: Call(bytearray, 10**10),
    'memory of nobody': lambda: Call(torch.Tensor, 10**10),
    'a codec': lambda: Call(pickle.codecs.encode, 'a' * 100, 'punycode'),
    'a sparse tensor': lambda: torch.eye(3).to_sparse(),
    'a tensor outside of its storage': lambda: Call(
        torch._utils._rebuild_tensor_v2,
        torch.zeros(2)._typed_storage(),
        10**6,
        (10**6,),
        (1,),
        False,
        OrderedDict(),
    ),
}


def save_pickle(path, data):
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr('a/data.pkl', data)
        archive.writestr('a/version', '3')


def nested_key(depth):
    """``{(((...),),): 1}``, whose hash overflows the stack of C."""
    return b'\x80\x02}' + b')' + depth * b'\x85' + b'K\x01s.'


def nested_list(depth):
    return b'\x80\x02' + depth * b']' + (depth - 1) * b'a' + b'.'


def copies(num):
    """A text of 1 MB, encoded many times, with 10 bytes of file each."""
    text = 10**6 * b'a'
    start = (
        b'\x80\x02}X\x01\x00\x00\x00a]c_codecs\nencode\nq\x01X'
        + struct.pack('<I', len(text))
        + text
        + b'q\x00X\x06\x00\x00\x00latin1q\x02\x86Ra'
    )
    return start + num * b'h\x01h\x00h\x02\x86Ra' + b's.'


def save_views(path, num):
    """Many views of one weight: 4 MB that claim to be a hundred times as much."""
    weight = torch.zeros(1000, 1000)
    torch.save(dict(state_dict={str(i): weight.view(1000, 1000) for i in range(num)}), path)


def save_expanded(path):
    """A weight of 4 bytes that claims to be 4 TB."""
    torch.save(dict(state_dict=dict(weight=torch.zeros(1).expand(10**6, 10**6))), path)


def recompressed(source, target):
    """The same archive with compressed records, of which 1 MB may be 1 GB."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, 'w', zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
