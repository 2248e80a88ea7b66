"""List the operators of mmcv that the models of mmdet's and mmseg's configs use.

A model with an operator that has no replacement needs the compiled mmcv.
"""

import argparse
import ast
import copy
import importlib
import inspect
import json
import re
import sys
import warnings
from collections import Counter, defaultdict
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument('--out', metavar='FILE.json', help='also write the lists to this file')
parser.add_argument('--only', default='*', metavar='PATTERN', help='configs, such as retinanet/*')


def missing_functions() -> dict[str, set[str]]:
    """Return the functions of ``mmcv._ext`` without a replacement, by module of ``mmcv.ops``."""
    import mmcv

    from aft_mm.hosts.mmcv_ext import SUPPORTED

    found = {}
    for path in (Path(mmcv.__file__).parent / 'ops').glob('*.py'):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, 'attr', '') == 'load_ext':
                names = ast.literal_eval(node.args[1])
                found[f'mmcv.ops.{path.stem}'] = {*names} - SUPPORTED.keys()
    return found


def used_operators(model) -> set[tuple[str, str]]:
    found = set()
    for layer in {type(layer) for layer in model.modules()}:
        for base in layer.__mro__:
            found.add((base.__module__, base.__name__))
            if base.__module__.startswith(('mmdet.', 'mmseg.')):
                values = vars(sys.modules[base.__module__]).values()
                found |= {
                    (value.__module__, value.__name__)
                    for value in values
                    if inspect.isfunction(value)
                }
    return {(module, name) for module, name in found if module.startswith('mmcv.ops.')}


def reason(error: Exception) -> str:
    text = re.sub(r'/\S*/', '', ' '.join(str(error).split()))
    return f'{type(error).__name__}: {text[:70]}'


def build(registry, model):
    import torch

    with torch.device('meta'):
        try:
            return registry.build(copy.deepcopy(model))
        except RuntimeError as error:
            if 'meta tensors' not in str(error):
                raise
    return registry.build(copy.deepcopy(model))


def main() -> None:
    args = parser.parse_args()
    from mmengine.config import Config
    from mmengine.registry import DefaultScope
    from rich.progress import track

    import aft_mm.registry  # noqa: F401

    warnings.simplefilter('ignore')
    missing = missing_functions()
    report = {}
    for library in ('mmdet', 'mmseg'):
        models = importlib.import_module(f'{library}.models')
        registry = importlib.import_module(f'{library}.registry').MODELS
        root = Path(models.__file__).parents[1] / '.mim' / 'configs'
        uses, failures, seen = Counter(), Counter(), defaultdict(list)
        for path in sorted(root.glob(f'{args.only}/*.py' if args.only == '*' else args.only)):
            if path.parent.name in ('_base_', 'common'):
                continue
            try:
                model = Config.fromfile(path).get('model')
            except Exception as error:  # a config is a program, and may raise anything
                failures[reason(error)] += 1
                continue
            if model:
                seen[json.dumps(model.to_dict(), sort_keys=True, default=str)].append((path, model))
        for configs in track(seen.values(), description=library):
            path, model = configs[0]
            try:
                with DefaultScope.overwrite_default_scope(library):
                    built = build(registry, model)
            except Exception as error:
                failures[reason(error)] += len(configs)
                continue
            for operator in used_operators(built):
                uses[operator] += len(configs)
        report[library] = {
            'configs': sum(map(len, seen.values())),
            'operators': {
                f'{module.removeprefix("mmcv.ops.")}.{name}': {
                    'configs': number,
                    # nms.py also loads the operators of rotated boxes, which other names use.
                    'supported': not missing.get(module)
                    or (name.islower() and name not in missing[module]),
                }
                for (module, name), number in uses.most_common()
            },
            'not built': dict(failures.most_common()),
        }
    text = json.dumps(report, indent=1)
    print(text)
    if args.out:
        Path(args.out).write_text(text + '\n')


if __name__ == '__main__':
    main()
