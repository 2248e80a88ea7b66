"""How much of the package mypy does not check; each number may only fall."""

import tomllib

from .helpers import ROOT

STRICT = ('ops', 'layers', 'models', 'apis')
# Checks that mypy's sections switch off, times the modules of ours in the section.
SWITCHED_OFF = 46
# Lines with a `type: ignore`.
IGNORED_LINES = 16


def overrides() -> list[tuple[list[str], set[str]]]:
    """Return the modules of ours and the switched-off checks of each section."""
    mypy = tomllib.loads((ROOT / 'pyproject.toml').read_text())['tool']['mypy']
    assert mypy['strict']
    found = []
    for section in mypy['overrides']:
        off = {name for name, value in section.items() if value is False}
        off |= {*section.get('disable_error_code', ())}
        found.append(([name for name in section['module'] if name.startswith('aft_mm')], off))
    return found


def test_checks_are_only_switched_on():
    assert sum(len(modules) * len(off) for modules, off in overrides()) <= SWITCHED_OFF


def test_rooms_are_strict_but_for_untyped_libraries():
    """Only what base classes, decorators and kernels of others lack is off in them."""
    off = {}
    for modules, names in overrides():
        for name in modules:
            if name == 'aft_mm.*' or name.split('.')[1] in STRICT:
                off[name] = off.get(name, set()) | names
    assert off == {
        'aft_mm.*': {'disallow_subclassing_any', 'disallow_untyped_decorators'},
        'aft_mm.ops.*': {'union-attr'},
        'aft_mm.ops.triton.*': {'warn_return_any'},
    }


def test_lines_are_no_more_ignored():
    assert (
        sum(path.read_text().count('# type: ignore') for path in (ROOT / 'aft_mm').rglob('*.py'))
        <= IGNORED_LINES
    )
