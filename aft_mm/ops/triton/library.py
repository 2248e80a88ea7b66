"""The ops and steps that have a kernel."""

from .conv import aft_conv as aft_conv
from .full_local import aft_full as aft_full
from .full_local import aft_full_batched as aft_full_batched
from .full_local import aft_local as aft_local
from .simple import aft_simple as aft_simple
from .steps import aft_conv_step as aft_conv_step
from .steps import aft_full_step as aft_full_step
from .steps import aft_local_hard_step as aft_local_hard_step
from .steps import aft_local_step as aft_local_step
from .steps import aft_simple_step as aft_simple_step
