"""Pure tensor functions of AFT and of linear attention. They import torch only.

The AFT ops compute, with different ``W = exp(w)``::

    y_t = g(q_t) ⊙ Σ_t' W[t,t'] e^{k_t'} ⊙ v_t' / Σ_t' W[t,t'] e^{k_t'}

Sums are float32, or float64 for float64 tokens; the result [B, T, D] has the dtype of value. Shared
arguments:

- query [B, T, D]: q, which gates the output; None with ``gate='none'``.
- key [B, S, D]: k. T = S if the op is causal or has a window or a kernel.
- value [B, S, D]: v.
- causal: Whether sums run over t' ≤ t, in raster order on a grid.
- key_mask: bool [B, S], True for keys to keep. Hidden keys and values may hold NaN or inf and get a
  gradient of 0; a row that sees no key gives 0.
- gate: g, 'none', an activation of torch by name, such as 'sigmoid', 'tanh', 'silu' or 'identity',
  or a module or function that keeps the shape. :func:`apply_gate` applies it in a mixer of your
  own.
- cu_seqlens, of aft_simple, aft_decay, aft_full, and aft_local and aft_conv on a 1-d grid: int32 or
  int64 [N + 1], 0 first and T last: the batch is one row, [1, T, D], of N sequences. The bias is
  that of the longest one. Its values are read: keep it on the CPU.

Results are exact to rounding for any finite
keys, position biases up to ±80 and values up to ±1e8; only sums of relu keys may overflow
(docs/ops.md).
"""

from .conv_plan import ConvPlan, plan_conv
from .export_paths import record_paths, replay_paths
from .functional import (
    aft_conv,
    aft_conv_joined,
    aft_decay,
    aft_full,
    aft_local,
    aft_local_hard,
    aft_local_learned,
    aft_simple,
)
from .linear import (
    linear_attention,
    linear_attention_init_state,
    linear_attention_prefill,
    linear_attention_step,
)
from .linear_terms import LinearState
from .online_softmax import apply_gate
from .packed_batch import mix_packed
from .state import StepState, prefill, select
from .steps import (
    aft_conv_init_state,
    aft_conv_step,
    aft_decay_init_state,
    aft_decay_step,
    aft_full_init_state,
    aft_full_step,
    aft_local_hard_init_state,
    aft_local_hard_step,
    aft_local_init_state,
    aft_local_learned_init_state,
    aft_local_learned_step,
    aft_local_step,
    aft_simple_init_state,
    aft_simple_step,
)

__all__ = [
    'ConvPlan',
    'LinearState',
    'StepState',
    'aft_conv',
    'aft_conv_init_state',
    'aft_conv_joined',
    'aft_conv_step',
    'aft_decay',
    'aft_decay_init_state',
    'aft_decay_step',
    'aft_full',
    'aft_full_init_state',
    'aft_full_step',
    'aft_local',
    'aft_local_hard',
    'aft_local_hard_init_state',
    'aft_local_hard_step',
    'aft_local_init_state',
    'aft_local_learned',
    'aft_local_learned_init_state',
    'aft_local_learned_step',
    'aft_local_step',
    'aft_simple',
    'aft_simple_init_state',
    'aft_simple_step',
    'apply_gate',
    'linear_attention',
    'linear_attention_init_state',
    'linear_attention_prefill',
    'linear_attention_step',
    'mix_packed',
    'plan_conv',
    'prefill',
    'record_paths',
    'replay_paths',
    'select',
]
