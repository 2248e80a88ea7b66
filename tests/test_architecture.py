"""Import rules of the code base, with the table of the design document."""

import ast
from functools import cache
from pathlib import Path

import torch

from aft_mm.ops.export_paths import RUNTIMES

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / 'aft_mm'
FILES = sorted(PACKAGE.rglob('*.py'))
HOSTS = {'mmpretrain', 'mmdet', 'mmseg'}
GROUND = {
    'errors',
    'checks',
    'deprecation',
    'images',
    'openmmlab',
    'outputs',
    'packed',
    'progress',
    'registry',
}
# What each part of aft_mm may import of the others.
ALLOWED = {
    '__init__': set(),
    '__main__': {'cli'},
    'errors': set(),
    'openmmlab': set(),
    'registry': {'openmmlab'},
    'checks': {'errors'},
    'deprecation': set(),
    'images': {'checks', 'errors'},
    'outputs': {'errors'},
    'packed': {'errors'},
    'progress': set(),
    'ops': {'checks'},
    'compat': {'ops'},
    'layers': {'ops'} | GROUND,
    'structures': GROUND,
    'tokenizers': GROUND,
    'models': {'layers', 'structures', 'tokenizers'} | GROUND,
    'datasets': {'structures', 'tokenizers'} | GROUND,
    'evaluation': {'structures', 'tokenizers'} | GROUND,
    'visualization': {'structures', 'tokenizers'} | GROUND,
    'checkpoint': {'structures'} | GROUND,
    'config': {'structures'} | GROUND,
    'testing': {'layers'} | GROUND,
    'timm': {'models'} | GROUND,
    'transformers': {'layers', 'models'} | GROUND,
    'hosts': {'structures'} | GROUND,
    'engine': {'checkpoint', 'config', 'visualization', 'structures'} | GROUND,
}
BELOW_CLI = set(ALLOWED) - {'__main__'} | {'apis'}
# What the commands do; these three do not import each other.
PROGRAMS = {'analysis', 'convert', 'export'}
ALLOWED |= dict.fromkeys(PROGRAMS, BELOW_CLI)
ALLOWED['apis'] = ALLOWED['cli'] = BELOW_CLI | PROGRAMS
BACKENDS = ('eager', 'native', 'triton', 'cuda')
# Modules of ops that others may import.
PUBLIC_OPS = {'checks', 'dispatch', 'export_conv', 'export_paths', 'geometry', 'kernel_check'}
PUBLIC_OPS |= {'gates', 'linear_terms', 'state', 'tracing', 'values'}
# Files of ops/triton that load without Triton.
WITHOUT_TRITON = {'__init__', 'availability'}
MAX_LINES = 700


def owner(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix('').parts[0]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


@cache
def imports(path: Path) -> list[tuple[ast.stmt, str]]:
    parts = path.relative_to(ROOT).with_suffix('').parts
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level] if node.level else ()
            stem = '.'.join([*base, *filter(None, [node.module])])
            found += [(node, f'{stem}.{alias.name}') for alias in node.names]
    return found


def needs_triton(path: Path) -> bool:
    return path.parent.name == 'triton' and path.stem not in WITHOUT_TRITON


def dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return owner and f'{owner}.{node.attr}'
    return node.id if isinstance(node, ast.Name) else None


def test_everything_named_of_torch_exists():
    """Also what only a GPU reaches; the first GPU that ran it lacked a private function."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            name = dotted(node) if isinstance(node, ast.Attribute) else None
            if name and name.startswith(('torch.cuda.', 'torch._C.', 'torch.backends.')):
                place, value = f'{path} line {node.lineno}', torch
                for part in name.split('.')[1:]:
                    value = getattr(value, part, None)
                    assert value is not None, f'{place}: {name} does not exist'


def test_packages_import_only_what_the_table_allows():
    for path in FILES:
        allowed = ALLOWED[owner(path)] | {owner(path), '__version__'}
        for _, name in imports(path):
            package, _, rest = name.partition('.')
            if package == 'aft_mm':
                assert rest.partition('.')[0] in allowed, f'{path} imports {name}'
            assert package not in HOSTS, f'{path} imports {name}; use a config string'


def test_above_ops_only_its_public_names_are_imported():
    modules = {path.stem for path in PACKAGE.glob('ops/*') if '__' not in path.name}
    assert PUBLIC_OPS <= modules
    for path in FILES:
        if owner(path) != 'ops':
            parts = [name.split('.') for _, name in imports(path)]
            names = {part[2] for part in parts if part[:2] == ['aft_mm', 'ops'] and part[2:]}
            inside = names & (modules - PUBLIC_OPS)
            assert not inside, f'{path} imports {inside} of aft_mm.ops'


def test_no_backend_imports_another_but_native_its_fallback():
    for path in FILES:
        backend = '.'.join(path.relative_to(PACKAGE).parts[:2])
        if backend.removeprefix('ops.') in BACKENDS:
            allowed = {backend} | ({'ops.eager'} if backend == 'ops.native' else set())
            forbidden = {f'ops.{name}' for name in BACKENDS} | {'ops.reference', 'ops.dispatch'}
            for _, name in imports(path):
                part = '.'.join(name.split('.')[1:3])
                assert part not in forbidden - allowed, f'{path} imports {name}'


def test_no_backend_names_a_runtime_of_exported_graphs():
    for path in PACKAGE.glob('ops/eager/*.py'):
        constants = {
            n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)
        }
        assert not constants & set(RUNTIMES[1:]), path


def test_ops_and_what_they_import_need_torch_only():
    for path in FILES:
        if owner(path) in {'ops', 'checks', 'errors'}:
            third_party = {'mmengine', 'mmcv', 'torchvision', 'numpy', 'timm'}
            if not needs_triton(path):  # CPU builds of torch come without it
                third_party.add('triton')
            found = third_party & {name.partition('.')[0] for _, name in imports(path)}
            assert not found, f'{path} imports {found}'


def test_no_import_circles():
    modules = {module_name(path): path for path in FILES}

    def imported(name: str) -> set[str]:
        found = set()
        for _, target in imports(modules[name]):
            while target and target not in modules:
                target = target.rpartition('.')[0]
            found.add(target)
        return found - {'', name, 'aft_mm'}

    graph = {name: imported(name) for name in modules}
    while graph:
        resolved = {name for name, targets in graph.items() if not targets & graph.keys()}
        assert resolved, f'a circle among {sorted(graph)}'
        graph = {name: targets for name, targets in graph.items() if name not in resolved}


def test_imports_are_at_the_top_public_and_explicit():
    for path in FILES:
        for node, name in imports(path):
            place = f'{path} line {node.lineno}'
            # Only an optional library or a backend may be imported when it is needed.
            late = not name.startswith('aft_mm') or path.name == 'dispatch.py'
            assert node.col_offset == 0 or late, f'{place}: not at the top'
            assert not name.endswith('.*'), f'{place}: star import'
            public = all(part[0] != '_' or part == '__future__' for part in name.split('.'))
            relative = isinstance(node, ast.ImportFrom) and node.level > 0
            assert public or relative, f'{place}: private name {name}'
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Try) and any(
                isinstance(n, ast.Import | ast.ImportFrom) for n in node.body
            ):
                assert all(isinstance(h.body[-1], ast.Raise) for h in node.handlers), (
                    f'{path} line {node.lineno}: swallows a failed import'
                )


def test_configs_import_nothing_and_tools_use_public_names():
    configs = sorted((ROOT / 'configs').rglob('*.py'))
    assert configs and not [path for path in configs if imports(path)]
    for path in (ROOT / 'tools').rglob('*.py'):
        private = [name for _, name in imports(path) if 'aft_mm' in name and '._' in name]
        assert not private, f'{path} imports {private}'
        assert not [name for _, name in imports(path) if name.startswith('tests')], path


def test_files_are_short():
    for folder in ('aft_mm', 'tools', 'tests'):
        lengths = {
            path: len(path.read_text().splitlines()) for path in (ROOT / folder).rglob('*.py')
        }
        assert lengths and not {p: length for p, length in lengths.items() if length > MAX_LINES}
