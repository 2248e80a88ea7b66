"""A verdict on the user's own device before a kernel serves unasked.

Nobody who wrote a kernel has run it on every device, driver and compiler that it meets. At the
first use of an op, type and device a process of its own checks the kernels against the oracle on
inputs that break kernels, times them against eager, and keeps the verdict on disk.

- `policy.py`: may the kernels serve? What dispatch asks;
- `process.py`: the check in a process of its own, one at a time;
- `verdicts.py`: what a verdict is about and where it lies;
- `judge.py`: what that process does; `cases.py`: the inputs.
"""

from .policy import mode, reason_against
from .process import NotCheckedError, find, make
from .verdicts import Subject, Verdict

__all__ = ['NotCheckedError', 'Subject', 'Verdict', 'find', 'make', 'mode', 'reason_against']
