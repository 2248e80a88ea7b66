"""The installed packages, and conflicts among their versions."""

from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distributions, requires

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

PYTHON = SpecifierSet('>=3.11,<3.14')
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
#: mmcv and mmcv-lite have the same files, so one may be over the other.
OVER_EACH_OTHER = {'mmcv-lite', 'mmcv'}


def installed() -> dict[str, str]:
    return {canonicalize_name(one.name): one.version for one in distributions() if one.name}


def own_requirements() -> list[Requirement]:
    try:
        texts = requires('aft_mm') or ()
    except PackageNotFoundError:
        return []
    requirements = map(Requirement, texts)
    return [one for one in requirements if one.marker is None or one.marker.evaluate({'extra': ''})]


def torch_requirement() -> Requirement | None:
    try:
        texts = requires('torchvision') or ()
    except PackageNotFoundError:
        return None
    return next((one for one in map(Requirement, texts) if one.name == 'torch'), None)


def problems(
    versions: Mapping[str, str],
    python: str,
    needed: Iterable[Requirement],
    built_for: Requirement | None,
) -> Iterator[tuple[str, str]]:
    """Yield problems of the environment, each with the command that fixes it."""
    if not PYTHON.contains(python):
        yield (
            f'Python {python} is not supported ({PYTHON})',
            'python3.13 -m venv .venv',
        )
    yield from _missing(versions, needed)
    yield from _twice(versions)
    yield from _torch_pairs(versions, built_for)


def _missing(
    versions: Mapping[str, str], needed: Iterable[Requirement]
) -> Iterator[tuple[str, str]]:
    for requirement in needed:
        name = canonicalize_name(requirement.name)
        # A fork or a compiled variant replaces a package.
        same = next((names for names in SAME_MODULES.values() if name in names), ())
        fix = f"pip install '{requirement.name}{requirement.specifier}'"
        there = [other for other in dict.fromkeys((name, *same)) if other in versions]
        if not there:
            yield f'{requirement.name} is missing', fix
        # Forks have versions of their own.
        for other in [other for other in there if not other.startswith('onedl-')]:
            if not requirement.specifier.contains(versions[other], prereleases=True):
                yield (
                    f'{other} is {versions[other]}, and aft_mm needs {requirement.specifier}',
                    fix if there == [name] else f'pip uninstall -y {" ".join(there)}; {fix}',
                )


def _twice(versions: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for module, names in SAME_MODULES.items():
        there = [name for name in names if name in versions]
        if len(there) > 1 and set(there) != OVER_EACH_OTHER:
            yield (
                f'{" and ".join(there)} are all installed and overwrite each other: all contain '
                f'the module {module}',
                f'pip uninstall -y {" ".join(there)}; pip install '
                f"'{there[0]}=={versions[there[0]]}'",
            )


def _torch_pairs(
    versions: Mapping[str, str], built_for: Requirement | None
) -> Iterator[tuple[str, str]]:
    if 'torch' not in versions:
        return
    torch, name = Version(versions['torch']), 'torchvision'
    if name not in versions:
        return
    other = Version(versions[name])
    if built_for is not None and not built_for.specifier.contains(torch, prereleases=True):
        yield (
            f'{name} {other} is built for torch {built_for.specifier}, got torch {torch}',
            f"pip install 'torch=={torch.public}' {name}",
        )
    elif ('cpu' in (torch.local or '')) != ('cpu' in (other.local or '')):
        yield (
            f'only one of torch {torch} and {name} {other} is a CPU-only build, so they '
            'cannot be imported together',
            'install both from the same index',
        )
