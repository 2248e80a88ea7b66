from importlib import import_module
from importlib.util import find_spec
from typing import Any

if find_spec('mmcv') is not None:  # it registers the steps that configs name beside ours
    import_module('mmcv.transforms')


class Transform:
    """A step that changes the results of the one before it."""

    def __call__(self, results: dict[str, Any]) -> dict[str, Any] | None:
        return self.transform(results)

    def transform(self, results: dict[str, Any]) -> dict[str, Any] | None:
        """Return the results, or None for a sample to leave out."""
        raise NotImplementedError
