"""The house rules that a reader cannot be relied on to keep: who imports whom, and how."""

import ast
import importlib
import importlib.util
import pkgutil
from collections.abc import Sequence
from pathlib import Path

import pytest

import aft_mm

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / 'aft_mm'
FILES = sorted(PACKAGE.rglob('*.py'))
HOSTS = {'mmpretrain', 'mmdet', 'mmseg'}
TRITON = PACKAGE / 'ops' / 'triton'
WITHOUT_TRITON = {'__init__', 'availability'}  # files that load where Triton is missing
# What a folder or module of aft_mm may import of the others; itself it always may. A module with a
# row of its own is not of its folder: hooks raise the errors of the command line, which runs them.
# What a plain value may be is said in one place, `checks`, which everything imports.
ALLOWED = {
    '__init__': set(),
    '__main__': {'cli'},
    'checks': set(),
    'checkpoint': {'errors'},
    'registry': {'checkpoint'},
    'ops': set(),
    'layers': {'ops', 'registry'},
    'models': {'layers', 'registry', 'structures', 'tokenizers'},
    'structures': set(),
    'datasets': {'registry', 'structures', 'tokenizers'},
    'evaluation': {'registry', 'structures', 'tokenizers'},
    'visualization': {'errors', 'registry', 'structures', 'tokenizers'},
    'errors': set(),
    'tokenizers': {'errors'},
    'engine': {
        'checkpoint',
        'errors',
        'registry',
        'structures',
        'tokenizers',
        'visualization',
    },
    'cli': {'checkpoint', 'errors', 'engine'},
}
# What people call, who may use everything.
FOR_PEOPLE = {'apis', 'cli.commands'}
every_file = pytest.mark.parametrize('path', FILES, ids=lambda path: str(path.relative_to(ROOT)))


def row(parts: Sequence[str]) -> str:
    """The row of ALLOWED that a module falls under, such as ``('cli', 'errors')``."""
    return '.'.join(parts[:2]) if '.'.join(parts[:2]) in ALLOWED.keys() | FOR_PEOPLE else parts[0]


def owner(path: Path) -> str:
    return row(path.relative_to(PACKAGE).with_suffix('').parts)


def imports(path: Path) -> list[tuple[ast.stmt, str]]:
    """Every import statement of a file and the absolute name of what it imports."""
    module = path.relative_to(ROOT).with_suffix('').parts
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = module[: len(module) - node.level] if node.level else ()
            stem = '.'.join([*base, *filter(None, [node.module])])
            found += [(node, f'{stem}.{alias.name}') for alias in node.names]
    return found


@every_file
def test_imports_follow_the_layers(path):
    if owner(path) in FOR_PEOPLE:
        return
    for _, name in imports(path):
        package, _, rest = name.partition('.')
        if package == 'aft_mm':
            target = row(rest.split('.'))
            allowed = ALLOWED[owner(path)] | {owner(path), 'checks', '__version__'}
            assert target in allowed, f'{path} imports {name}'
        assert package not in HOSTS, f'{path} imports {name}; reach it through a config'


@every_file
def test_ops_import_torch_and_the_standard_library_only(path):
    if owner(path) == 'ops':
        third_party = {'mmengine', 'mmcv', 'torchvision', 'numpy', 'timm'}
        # Torch's CPU builds come without it, and what says so is asked there, too.
        if path.parent != TRITON or path.stem in WITHOUT_TRITON:
            third_party.add('triton')
        assert not third_party & {name.partition('.')[0] for _, name in imports(path)}


@every_file
def test_imports_stand_at_the_top_and_name_what_they_import(path):
    for node, name in imports(path):
        # Only an optional library, or a backend that needs one, may be imported when it is needed.
        optional = not name.startswith('aft_mm') or path.name == 'dispatch.py'
        assert node.col_offset == 0 or optional, f'{path} line {node.lineno}: import not at the top'
        assert not name.endswith('.*'), f'{path} line {node.lineno}: star import'
        public = all(not part.startswith('_') or part == '__future__' for part in name.split('.'))
        relative = isinstance(node, ast.ImportFrom) and node.level > 0
        assert public or relative, f'{path} line {node.lineno}: private name {name}'


@every_file
def test_no_failed_import_is_passed_over(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Try) and any(
            isinstance(n, ast.Import | ast.ImportFrom) for n in node.body
        ):
            assert all(isinstance(h.body[-1], ast.Raise) for h in node.handlers), path


@pytest.mark.parametrize('folder', ['aft_mm', 'tools', 'tests'])
def test_files_are_short(folder):
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / folder).rglob('*.py')}
    assert lengths and not {path: length for path, length in lengths.items() if length >= 400}


@pytest.mark.parametrize('folder', ['aft_mm', 'tools'])
def test_functions_fit_a_screen(folder):
    """At most 60 lines below the docstring."""
    lengths = {}
    for path in (ROOT / folder).rglob('*.py'):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                body = node.body[ast.get_docstring(node) is not None :]
                if body:
                    lengths[f'{path}:{node.lineno}'] = body[-1].end_lineno - body[0].lineno + 1
    assert lengths and not {name: n for name, n in lengths.items() if n > 60}


def test_configs_import_nothing():
    configs = sorted((ROOT / 'configs').rglob('*.py'))
    assert configs and not [path for path in configs if imports(path)]


def test_tools_use_public_names():
    for path in (ROOT / 'tools').rglob('*.py'):
        private = [name for _, name in imports(path) if 'aft_mm' in name and '._' in name]
        assert not private, f'{path} imports {private}'


def test_every_module_imports_alone_and_in_any_order():
    def refuse(name: str) -> None:
        raise AssertionError(name)

    names = [m.name for m in pkgutil.walk_packages(aft_mm.__path__, 'aft_mm.', refuse)]
    for name in names:
        if name.startswith('aft_mm.ops.triton.') and name.split('.')[-1] not in WITHOUT_TRITON:
            if importlib.util.find_spec('triton') is None:
                continue
        if not name.endswith('__main__'):
            importlib.import_module(name)
