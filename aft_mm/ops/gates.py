from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aft_mm.checks import described, refuse

#: A name, or a module or function that keeps the shape.
Gate = str | Callable[[Tensor], Tensor]
GATES = ('none', 'sigmoid', 'relu')  # those of kernels, in the order of native/vectors.h
_OF_TORCH_NN = (
    'celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 selu '
    'silu softplus softshrink softsign tanhshrink'
).split()
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    'sigmoid': torch.sigmoid,
    'relu': torch.relu,
    'identity': torch.clone,
    'tanh': torch.tanh,
    **{name: getattr(F, name) for name in _OF_TORCH_NN},
}


def in_kernels(gate: Any) -> bool:
    """Return whether kernels compute a gate; torch applies another to their result."""
    return isinstance(gate, str) and gate in GATES


def check_gate(gate: Any) -> None:
    is_name = isinstance(gate, str) and (gate == 'none' or gate in FUNCTIONS)
    # A class is callable too, but makes a module.
    if not is_name and (isinstance(gate, (str, type)) or not callable(gate)):
        refuse('gate', f'none, {", ".join(FUNCTIONS)}, or a module or function', gate)


def gate_values(query: Tensor, gate: Gate) -> Tensor:
    """Return g(q), new memory unless `gate` is a module or function."""
    if isinstance(gate, str) and gate in FUNCTIONS:
        return FUNCTIONS[gate](query)
    check_gate(gate)
    assert not isinstance(gate, str)
    # The layers of torch refuse another dtype than that of their parameters.
    parameters = list(gate.parameters()) if isinstance(gate, nn.Module) else []
    given = query.to(parameters[0].dtype if parameters else query.dtype, copy=True)
    values = gate(given)  # which a module may overwrite
    if not isinstance(values, Tensor) or values.shape != query.shape:
        raise ValueError(
            f'gate must return a tensor of the shape {list(query.shape)} of query, got '
            f'{described(values)} from {described(gate)}'
        )
    return values.to(query.dtype)
