"""What mmengine asks of ``pkg_resources``, which setuptools 82 removed."""

from importlib.metadata import Distribution, PackageNotFoundError, distribution

__all__ = ['DistributionNotFound', 'get_distribution']

DistributionNotFound = PackageNotFoundError


class _Found:
    def __init__(self, found: Distribution) -> None:
        self.version = found.version
        self.location = str(found.locate_file(''))
        self.has_metadata = lambda name: found.read_text(name) is not None
        self.get_metadata = found.read_text


def get_distribution(name: str) -> _Found:
    """Return version, folder and metadata of an installed package.

    Raises:
        DistributionNotFound: It is not installed.
    """
    return _Found(distribution(name))


def fixup_namespace_packages(path: str) -> None:
    """Do nothing; pytest calls it if a module of this name is loaded."""
