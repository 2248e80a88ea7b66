"""Refuse entries of a config that the parts of a run do not take, before one is built."""

import inspect
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any

from mmengine.config import Config
from mmengine.registry import HOOKS, LOOPS, OPTIM_WRAPPERS, OPTIMIZERS, PARAM_SCHEDULERS, Registry
from torch.utils.data import DataLoader

from aft_mm.errors import INHERITED, UserError

#: Loops that a Runner builds without a type, by entry.
DEFAULT_LOOPS = {
    'train_cfg': 'EpochBasedTrainLoop',
    'val_cfg': 'ValLoop',
    'test_cfg': 'TestLoop',
}
#: The lengths of loops by epochs and by iterations.
LENGTHS = {'max_epochs': 'max_iters', 'max_iters': 'max_epochs'}
# What a Runner takes out of the entries or passes on itself.
_OF_LOADERS = ('num_batch_per_epoch', 'disable_subprocess_warning')
_OF_WRAPPERS = ('optimizer', 'constructor', 'paramwise_cfg')
_OF_SCHEDULERS = ('convert_to_iter_based',)
_PASSED = {'self', 'runner', 'dataloader', 'evaluator', 'params', 'optimizer', 'param_name'}

Part = tuple[str, Any, Registry, str, tuple[str, ...]]


def check_parts(cfg: Config) -> None:
    for split in ('train', 'val', 'test'):
        name = f'{split}_dataloader'
        _check(name, cfg.get(name), DataLoader, _OF_LOADERS)
    scope = cfg.get('default_scope') or 'mmengine'
    for place, part, parent, default, more in _parts(cfg):
        if not isinstance(part, dict):
            continue
        kind = part.get('type', default)
        if not kind:
            raise UserError(f'{place} must have a type, got {", ".join(part) or "none"}')
        if isinstance(kind, str):
            with parent.switch_scope_and_registry(part.get('_scope_', scope)) as registry:
                kind = registry.get(kind)
        _check(place, part, kind, ('type', *more))


def _parts(cfg: Config) -> Iterator[Part]:
    for name, default in DEFAULT_LOOPS.items():
        loop = cfg.get(name) or {}
        if not loop.get('by_epoch', True):
            default = 'IterBasedTrainLoop'
        yield name, loop, LOOPS, default, ('by_epoch',)
    wrapper = cfg.get('optim_wrapper') or {}
    if 'optimizer' in wrapper:  # else there are several wrappers
        yield 'optim_wrapper', wrapper, OPTIM_WRAPPERS, 'OptimWrapper', _OF_WRAPPERS
        yield 'optim_wrapper.optimizer', wrapper['optimizer'], OPTIMIZERS, '', ()
    schedules = cfg.get('param_scheduler')
    for number, schedule in enumerate(schedules if isinstance(schedules, list) else [schedules]):
        if isinstance(schedule, dict) and 'type' in schedule:  # else there are several optimizers
            yield f'param_scheduler.{number}', schedule, PARAM_SCHEDULERS, '', _OF_SCHEDULERS
    for name, hook in (cfg.get('default_hooks') or {}).items():
        yield f'default_hooks.{name}', hook, HOOKS, '', ('priority',)
    for number, hook in enumerate(cfg.get('custom_hooks') or ()):
        yield f'custom_hooks.{number}', hook, HOOKS, '', ('priority',)


def _check(place: str, part: Any, kind: Any, more: Iterable[str]) -> None:
    names = parameters(kind) if isinstance(kind, type) else None  # reported when it is built
    if not isinstance(part, dict) or names is None:
        return
    known = sorted(names - _PASSED | {*more})
    for key in part:
        if key in known or key == '_scope_':  # which mmengine adds for another package's base
            continue
        other = LENGTHS.get(key)
        if other in known:
            unit = 'iterations' if other == 'max_iters' else 'epochs'
            now = f', now {part[other]}' if other in part else ''
            raise UserError(
                f'{place} has no {key!r}, as it counts {unit}: set {place}.{other}{now}'
            )
        close = get_close_matches(str(key), known, n=1)
        raise UserError(
            f'{place} has no {key!r}; '
            + (f'did you mean {close[0]}? ' if close else '')
            + f'it may have {", ".join(known)}'
            + ('' if close else f'; {INHERITED}')
        )


def parameters(kind: type) -> set[str] | None:
    """Return the arguments of a class and of the bases that get its ``**kwargs``, None if any is taken."""
    names: set[str] = set()
    is_open = False
    for base in kind.__mro__[:-1]:
        if '__init__' not in vars(base):
            continue
        given = inspect.signature(vars(base)['__init__']).parameters.values()
        several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        names |= {one.name for one in given if one.kind not in several}
        is_open = any(one.kind is one.VAR_KEYWORD for one in given)
        if not is_open:
            break
    return None if is_open else names
