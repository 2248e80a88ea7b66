"""The default backend: composite torch operations that autograd and torch.compile see through.

The numerics policy, kept by every backend:

- exponentials and sums are float32 whatever the input (float64 stays float64), outputs have the
  type of value;
- each op has a fast path, one common shift and plain sums, that is exact to tolerance while keys
  and biases spread over less than the exponents of float32, and checks that; beyond it a safe path
  takes over, in float64 and with sums that carry their own shift (`sums.py`), for any finite key
  and |w| up to 80;
- shifts are detached: they cancel in the quotient, so its gradient does not depend on them;
- operands of a matrix product may be rounded where the error stays within twice that of rounding
  the result (`products.py`); w, an exponent, never is.

The files, from the ops down to the sums:

- `mixing.py`: the ops; `steps.py`: the same one token at a time;
- `bands.py`: the products of full and local with a dense or banded exp(w); `banded_product.py`:
  their fast form with its backward pass; `tile_by_tile.py`: its products where oneDNN is faster;
- `convolution.py`: AFT-conv; `dense_convolution.py`: its form for small grids on CUDA;
  `inference_convolution.py`: its form for a CPU without a gradient; `exact_convolution.py`: its
  form for any finite key; `library.py`: what torch.compile must see as one node;
- `linear.py`: linear attention, causal in chunks, with its backward pass;
- `products.py`: products of matrices and how they are rounded; `tokens.py`: how an op takes tokens
  in and gives its result out;
- `running_mean.py`: causal AFT-simple and its backward pass; `scan.py`: running sums in blocks;
- `sums.py`: the algebra of shifted sums; `decisions.py`: what is decided once, for an
  exported graph or a constant.
"""

from .linear import linear_attention, linear_attention_step
from .mixing import (
    aft_conv,
    aft_full,
    aft_local,
    aft_local_hard,
    aft_local_learned,
    aft_simple,
)
from .steps import (
    aft_conv_step,
    aft_full_step,
    aft_local_hard_step,
    aft_local_learned_step,
    aft_local_step,
    aft_simple_step,
)

__all__ = [
    'aft_conv',
    'aft_conv_step',
    'aft_full',
    'aft_full_step',
    'aft_local',
    'aft_local_learned',
    'aft_local_learned_step',
    'aft_local_step',
    'aft_simple',
    'aft_simple_step',
    'aft_local_hard',
    'aft_local_hard_step',
    'linear_attention',
    'linear_attention_step',
]
