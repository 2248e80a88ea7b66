"""Warnings of the libraries that every run would begin with, and that nobody can act on."""

import re
import warnings

#: How they begin, and why they are passed over.
KNOWN = (
    'pkg_resources is deprecated as an API',  # mmengine imports it to find mmdet and mmseg
    '``build_loss`` would be deprecated soon',  # mmseg calls its own function
    'Default ``avg_non_ignore`` is False',  # what mmseg's own configs take
    'The draw is False, it means that the hook',  # of mmseg's runtime, which draws nothing
)


def pass_over() -> None:
    """Let :data:`KNOWN` pass in silence; every other warning is shown as before."""
    for beginning in KNOWN:
        warnings.filterwarnings('ignore', re.escape(beginning), UserWarning)
