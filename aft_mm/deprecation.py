"""The warning of a name that goes; the policy is docs/deprecation.md."""

import warnings


def warn_old_name(old: str, new: str, goes: str) -> None:
    """Warn that `old` is replaced by `new`, by a FutureWarning, which Python shows everywhere.

    Args:
        goes: The version without the old name, such as '0.3.0'.
    """
    warnings.warn(
        f'{old} is now {new}; the old name goes in aft_mm {goes}', FutureWarning, stacklevel=3
    )
