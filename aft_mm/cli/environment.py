"""The installed packages: which versions there are, and which of them do not go together."""

from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distributions, requires

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

PYTHON = SpecifierSet('>=3.11,<3.14')
#: Packages with the same modules: OpenMMLab's, the compiled form, and those of the fork.
SAME_MODULES = {
    'mmengine': ('mmengine', 'onedl-mmengine'),
    'mmcv': ('mmcv-lite', 'mmcv', 'onedl-mmcv'),
    'mmpretrain': ('mmpretrain', 'onedl-mmpretrain'),
    'mmdet': ('mmdet', 'onedl-mmdetection'),
    'mmseg': ('mmsegmentation', 'onedl-mmsegmentation'),
    'cv2': (
        'opencv-python',
        'opencv-python-headless',
        'opencv-contrib-python',
        'opencv-contrib-python-headless',
    ),
}
#: mmcv and mmcv-lite hold the same files, and the compiled one is installed over the other.
OVER_EACH_OTHER = {'mmcv-lite', 'mmcv'}


def installed() -> dict[str, str]:
    """The version of every installed package by its normalised name."""
    return {canonicalize_name(found.name): found.version for found in distributions() if found.name}


def own_requirements() -> list[Requirement]:
    """What aft_mm needs to run, as its metadata says; nothing if it was not installed."""
    try:
        texts = requires('aft_mm') or ()
    except PackageNotFoundError:
        return []
    found = map(Requirement, texts)
    return [one for one in found if one.marker is None or one.marker.evaluate({'extra': ''})]


def problems(
    versions: Mapping[str, str], python: str, needed: Iterable[Requirement]
) -> Iterator[tuple[str, str]]:
    """What does not fit, each with the command that mends it.

    Args:
        versions: Of the installed packages, as :func:`installed` gives them.
        python: The version of Python.
        needed: What has to be there, as :func:`own_requirements` gives it.
    """
    if not PYTHON.contains(python):
        yield (
            f'Python {python} is not supported ({PYTHON}; mmengine calls pkgutil.find_loader, '
            'which 3.14 has no more)',
            'python3.13 -m venv .venv',
        )
    yield from _missing(versions, needed)
    yield from _twice(versions)
    yield from _torch_pairs(versions)
    mmcv = versions.get('mmcv') or versions.get('mmcv-lite')
    if mmcv and Version(mmcv) >= Version('2.2') and {'mmdet', 'mmsegmentation'} & versions.keys():
        yield f'mmcv {mmcv} is refused by mmdet 3.3 and mmsegmentation 1.2', 'make downstream'


def _missing(
    versions: Mapping[str, str], needed: Iterable[Requirement]
) -> Iterator[tuple[str, str]]:
    for requirement in needed:
        name = canonicalize_name(requirement.name)
        # A fork or a compiled form stands in for a package; its versions are its own.
        others = [
            other
            for names in SAME_MODULES.values()
            if name in names
            for other in names
            if other in versions
        ]
        mend = f"pip install '{requirement.name}{requirement.specifier}'"
        if name not in versions:
            if not others:
                yield f'{requirement.name} is missing', mend
        elif not requirement.specifier.contains(versions[name], prereleases=True):
            yield (
                f'{requirement.name} is {versions[name]}, and aft_mm needs {requirement.specifier}',
                mend,
            )


def _twice(versions: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for module, names in SAME_MODULES.items():
        there = [name for name in names if name in versions]
        if len(there) > 1 and set(there) != OVER_EACH_OTHER:
            yield (
                f'{" and ".join(there)} are all installed and write over each other: all are '
                f'the module {module}',
                f'pip uninstall -y {" ".join(there)}; pip install '
                f"'{there[0]}=={versions[there[0]]}'",
            )


def _torch_pairs(versions: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    if 'torch' not in versions:
        return
    torch = Version(versions['torch'])
    # torchvision 0.15 came with torch 2.0, and both count on since.
    for name, pair in (
        ('torchvision', f'0.{torch.minor + 15}'),
        ('torchaudio', f'{torch.major}.{torch.minor}'),
    ):
        if name not in versions or torch.major != 2:
            continue
        other = Version(versions[name])
        if f'{other.major}.{other.minor}' != pair:
            yield (
                f'{name} {other} is not built for torch {torch}, whose {name} is {pair}',
                f"pip install '{name}=={pair}.*'",
            )
        elif ('cpu' in (torch.local or '')) != ('cpu' in (other.local or '')):
            yield (
                f'of torch {torch} and {name} {other} one is built for the CPU alone, and they '
                'do not import together',
                'install both from the same index',
            )
