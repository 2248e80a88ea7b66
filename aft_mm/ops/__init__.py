"""Pure tensor functions of AFT and of linear attention; imports torch only."""

from .eager.decisions import constant, record_decisions, repeat_decisions
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
    'aft_local_init_state',
    'aft_local_learned',
    'aft_local_learned_init_state',
    'aft_local_learned_step',
    'aft_local_step',
    'aft_simple',
    'aft_simple_init_state',
    'aft_simple_step',
    'aft_local_hard',
    'aft_local_hard_init_state',
    'aft_local_hard_step',
    'constant',
    'linear_attention',
    'linear_attention_init_state',
    'linear_attention_prefill',
    'linear_attention_step',
    'prefill',
    'select',
    'record_decisions',
    'repeat_decisions',
]
