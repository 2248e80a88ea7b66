"""The oldest release of every allowed range."""

import importlib.util
import tomllib

from packaging.requirements import Requirement
from packaging.version import Version


def test_the_oldest_pins_are_the_lower_bounds(root):
    path = root / 'requirements/ranges.py'
    spec = importlib.util.spec_from_file_location('ranges', path)
    ranges = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ranges)
    project = tomllib.loads((root / 'pyproject.toml').read_text())['project']
    pins = {pin.name: pin for pin in map(Requirement, ranges.oldest(project))}
    assert {'torch', 'transformers', 'mmdet', 'mmpretrain', 'mmcv-lite', 'pillow'} <= set(pins)
    declared = [*project['dependencies'], *sum(project['optional-dependencies'].values(), [])]
    for requirement in map(Requirement, declared):
        if requirement.name in pins:
            (pin,) = pins[requirement.name].specifier
            assert requirement.specifier.contains(pin.version)
            older = f'{Version(pin.version).major - 1}.99'
            assert not requirement.specifier.contains(older)
    for test in ranges.TESTS:
        assert (root / 'tests' / test.partition('::')[0]).exists()
