"""Pure tensor functions of AFT and of linear attention. They import torch only.

Add a mixer of your own on top of the same parts: :func:`apply_gate` applies g(q) as every op does.
"""

from .eager.online_softmax import apply_gate
from .functional import (
    aft_conv,
    aft_full,
    aft_local,
    aft_local_hard,
    aft_local_learned,
    aft_simple,
)
from .linear import (
    LinearState,
    linear_attention,
    linear_attention_init_state,
    linear_attention_prefill,
    linear_attention_step,
)
from .path_choice import mark_constant, record_paths, replay_paths
from .state import StepState, prefill, select
from .steps import (
    aft_conv_init_state,
    aft_conv_step,
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
    'LinearState',
    'StepState',
    'aft_conv',
    'aft_conv_init_state',
    'aft_conv_step',
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
    'mark_constant',
    'prefill',
    'record_paths',
    'replay_paths',
    'select',
]
