"""The CUDA backend: fused Triton kernels; what they serve stands in `ops/triton_support.py`.

Keys, values and gates are read in any layout and summed in float32, each running sum with its own
maximum: no input needs a check or a second path.
"""

import torch
from torch import Tensor

from . import library


def aft_simple(query, key, value, *, key_function, causal, key_mask, gate) -> Tensor:
    """O(T·D): running sums, causal and with softmax keys."""
    differentiated = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (query, key, value)
    )
    return library.causal_simple(query, key, value, key_mask, gate, differentiated)[0]
