"""The default backend: composite torch operations, which autograd and torch.compile can trace.

The numerics policy, which every backend follows:

- Exponentials and sums are in ``promote_types(dtype, float32)``; outputs have the dtype of value.
- Each op has a fast path with one common shift and plain sums, which is exact to tolerance while
  the range of keys and biases is below that of float32 exponents. This is checked; otherwise a safe
  path, in float64 and with sums that carry their own shift, takes any finite key and |w| up to 80.
- Shifts are detached, as they cancel in the quotient. They are keys and not keys plus w: next to a
  key of 1e16 float64 loses w.
- Operands of a matrix product may be rounded if the error stays within twice that of rounding the
  result. w, an exponent, is never rounded, except by `torch.set_float32_matmul_precision` in the
  product of its factors.
"""

from .conv import aft_conv as aft_conv
from .decay import aft_decay as aft_decay
from .decay import aft_decay_step as aft_decay_step
from .full_batched import aft_full_batched as aft_full_batched
from .full_local import aft_full as aft_full
from .full_local import aft_local as aft_local
from .full_local import aft_local_learned as aft_local_learned
from .linear import linear_attention as linear_attention
from .linear import linear_attention_step as linear_attention_step
from .simple import aft_simple as aft_simple
from .steps import aft_conv_step as aft_conv_step
from .steps import aft_full_step as aft_full_step
from .steps import aft_local_hard_step as aft_local_hard_step
from .steps import aft_local_learned_step as aft_local_learned_step
from .steps import aft_local_step as aft_local_step
from .steps import aft_simple_step as aft_simple_step
from .window import aft_local_hard as aft_local_hard
