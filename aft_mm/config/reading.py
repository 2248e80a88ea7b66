import importlib
import inspect
import os
import re
import warnings
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mmengine.config import Config, ConfigDict
from mmengine.registry import HOOKS, LOOPS, OPTIM_WRAPPERS, OPTIMIZERS, PARAM_SCHEDULERS, Registry
from mmengine.runner import Runner
from torch.utils.data import DataLoader

import aft_mm.registry  # noqa: F401, finds bases such as aft_mm::own_data/image-folder
from aft_mm.checks import check_flag, check_int, check_number
from aft_mm.errors import INHERITED, SIMILARITY, UserError
from aft_mm.images import find_images, not_read
from aft_mm.openmmlab import warn

from .boxes import BOXES, check_boxes
from .finding import find_config, install_command
from .masks import check_masks
from .texts import quotable, type_name

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

#: mmengine's default constructor of optimizers, and its settings.
CONSTRUCTOR = 'DefaultOptimWrapperConstructor'
PARAMWISE = (
    *('custom_keys', 'bias_lr_mult', 'bias_decay_mult', 'norm_decay_mult', 'dwconv_decay_mult'),
    *('flat_decay_mult', 'bypass_duplicate', 'dcn_offset_lr_mult'),
)
#: Entries of its custom_keys, of env_cfg.mp_cfg and of env_cfg.
MULTIPLES = ('lr_mult', 'decay_mult')
PROCESSES = ('mp_start_method', 'opencv_num_threads')
ENVIRONMENT = ('cudnn_benchmark', 'mp_cfg', 'dist_cfg', 'resource_limit')

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
    _check_read_by_name(cfg)


def _check_read_by_name(cfg: Config) -> None:
    """Refuse keys of dicts from which mmengine gets those that it knows and ignores others."""
    wrapper = cfg.get('optim_wrapper') or {}
    paramwise = wrapper.get('paramwise_cfg') or {}
    if str(wrapper.get('constructor', CONSTRUCTOR)).rpartition('.')[2] == CONSTRUCTOR:
        _check_keys('optim_wrapper.paramwise_cfg', paramwise, PARAMWISE)
    for name, setting in (paramwise.get('custom_keys') or {}).items():
        for key in setting if isinstance(setting, dict) else ():  # others are the optimizer's
            close = get_close_matches(key, MULTIPLES, n=1, cutoff=SIMILARITY)
            if close and key not in MULTIPLES:
                raise UserError(f'custom_keys {name!r} has {key!r}; did you mean {close[0]}?')
    _check_keys('auto_scale_lr', cfg.get('auto_scale_lr'), ('enable', 'base_batch_size'))
    environment = cfg.get('env_cfg') or {}
    _check_keys('env_cfg', environment, ENVIRONMENT)
    _check_keys('env_cfg.mp_cfg', environment.get('mp_cfg'), PROCESSES)


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
    hooks = cfg.get('custom_hooks') or []
    if not isinstance(hooks, list | tuple):
        raise UserError(f'custom_hooks must be a list of dicts, got {hooks!r:.80}')
    for number, hook in enumerate(hooks):
        yield f'custom_hooks.{number}', hook, HOOKS, '', ('priority',)


def _check(place: str, part: Any, kind: Any, more: Iterable[str]) -> None:
    names = parameters(kind) if isinstance(kind, type) else None  # reported when it is built
    if names is not None:
        _check_keys(place, part, names - _PASSED | {*more})


def _check_keys(place: str, part: Any, known: Iterable[str]) -> None:
    if not isinstance(part, dict):
        return
    known = sorted(known)
    for key in part:
        # mmengine adds _scope_ for another package's base, and mmpretrain has a _delete.
        if key in known or key in ('_scope_', '_delete'):
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


#: Scopes of the libraries of detection and segmentation.
DOWNSTREAM = ('mmdet', 'mmseg')
#: Entries of a config that a Runner, the tools and the inferencers read.
READ = frozenset(
    {
        *inspect.signature(Runner.__init__).parameters,
        'custom_imports',
        'runner_type',
        'model_wrapper_cfg',
        'find_unused_parameters',
        'compile',
        'sync_bn',
        'tta_model',
        'tta_pipeline',
        'image_shape',
        'source_shape',
        'point_cloud',
        'subwords',
        'units',
    }
    - {'self', 'cfg'}
)
#: Names of intermediate variables, some similar to those in READ.
SHARED = frozenset(
    {
        'vis_backends',
        'pipeline',
        'train_pipeline',
        'val_pipeline',
        'test_pipeline',
        'dataset',
        'model_cfg',
    }
)
#: Ends of the types of data sets whose pipeline packs the samples, but may be left out.
IMAGE_DATA_SETS = ('CustomDataset', 'ImageNet', 'BaseSegDataset', 'CocoDataset', 'VOCDataset')
#: Library warnings that no user can act on.
KNOWN_WARNINGS = (
    'pkg_resources is deprecated as an API',  # mmengine imports it to find mmdet and mmseg
    '``build_loss`` would be deprecated soon',  # mmseg calls its own function
    'Default ``avg_non_ignore`` is False',  # the value of mmseg's own configs
    'The draw is False, it means that the hook',  # from mmseg's default runtime
    'Detected call of `scheduler.step()` before',  # where gradients are accumulated
    'Warning: The bbox is out of bounds',  # of a label in a picture
)


def read_config(path: str, options: Mapping[str, Any] | None = None) -> Config:
    """Execute a config file and merge ``--cfg-options`` into it.

    Args:
        path: Path of the config, or the name of a config of aft_mm.
        options: Values by dotted keys; None skips the check of keys as well.

    Raises:
        UserError: The file fails or needs missing libraries, or an entry or option has no effect.
    """
    path = find_config(path)
    for beginning in KNOWN_WARNINGS:
        warnings.filterwarnings('ignore', re.escape(beginning), UserWarning)
    try:
        _check_text(path)
        with _quotable_data_folder():
            cfg = Config.fromfile(path)
        if not cfg:
            raise UserError(f'config {path!r} must have entries such as model, got none')
        if cfg.get('default_scope') in DOWNSTREAM:  # else a type would only be called unknown
            importlib.import_module(f'{cfg.default_scope}.models')
    except UserError:
        raise
    except ImportError as error:
        if not any(name in str(error) for name in (*DOWNSTREAM, 'mmcv')):
            raise UserError(
                f'config {path!r} imports a missing module: {error.__cause__ or error}'
            ) from error
        raise UserError(
            f'config {path!r} needs mmdet and mmseg ({error}): {install_command("downstream")}'
        ) from error
    except RecursionError as error:
        raise UserError(f'config {path!r} has itself among its _base_') from error
    except Exception as error:  # a config may raise anything
        reason = ' '.join(str(error).split())
        raise UserError(
            f'config {path!r} cannot be read ({type(error).__name__}: {reason})'
        ) from error
    if options is None:
        return cfg
    try:
        check_keys(cfg, options)
        cfg.merge_from_dict(dict(options))
    except (AttributeError, KeyError, TypeError, AssertionError, IndexError) as error:
        raise UserError(f'--cfg-options do not fit {path!r}: {error}') from error
    return cfg


def _check_text(path: str) -> None:
    content = Path(path).read_bytes()
    try:
        found = 'zero bytes' if '\0' in content.decode() else ''
    except UnicodeDecodeError as error:
        found = f'a binary file or another encoding in byte {error.start}'
    if content.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        found = 'UTF-16'
    if found:
        raise UserError(f'config {path!r} must be a text in UTF-8, got {found}')


@contextmanager
def _quotable_data_folder() -> Iterator[None]:
    """Escape AFT_MM_DATA, which mmengine pastes between quotes with ``re.sub``."""
    folder = os.environ.get('AFT_MM_DATA')
    if folder is None:
        yield
        return
    os.environ['AFT_MM_DATA'] = quotable(folder).replace('\\', '\\\\')
    try:
        yield
    finally:
        os.environ['AFT_MM_DATA'] = folder


def check_keys(cfg: Config, options: Iterable[str] = ()) -> None:
    """Refuse misspelt entries, and `options` that are missing or already used, as ``train_pipeline``.

    They would otherwise be ignored silently.
    """
    # mmengine keeps the classes that a config in pure Python imports apart from its entries.
    imported = cfg.__dict__.get('_imported_names') or ()
    known, read = READ | SHARED | {*imported}, {name: cfg[name] for name in READ & cfg.keys()}
    for key in cfg:
        meant = get_close_matches(key, READ, n=1, cutoff=SIMILARITY)
        # A variable whose value occurs elsewhere was used.
        if key not in known and meant and not any(_uses(key, cfg[key], read)):
            raise UserError(f'{key!r} of the config is not used; did you mean {meant[0]!r}?')
    for option in options:
        key, _, rest = option.partition('.')
        if key not in known and key not in cfg:
            loop = cfg.get('train_cfg') or {}
            hint = f'; did you mean train_cfg.{key}?' if key in (*loop, *LENGTHS) else ''
            raise UserError(f'--cfg-options names {key!r}, which the config does not have{hint}')
        if key not in READ:
            uses = sorted(_uses(key, cfg.get(key), read))[:3]
            there = ' and '.join(f'{use}.{rest}'.rstrip('.') for use in uses)
            raise UserError(
                f'--cfg-options {option} has no effect, because the config has already used '
                f'{key!r}; change {there or "the config"} instead'
            )


def _uses(key: str, value: Any, tree: Any, at: str = '') -> Iterator[str]:
    parts: Any = tree.items() if isinstance(tree, dict) else ()
    if isinstance(tree, list):
        parts = enumerate(tree)
    for name, part in parts:
        path = f'{at}.{name}'.lstrip('.')
        is_use = name == key or isinstance(value, dict | list)
        if is_use and part == value and value not in ({}, []):
            yield path
        else:
            yield from _uses(key, value, part, path)


def check_settings(cfg: Config) -> None:
    """Check the numbers of a run, its optimizer and its pipelines; raises ValueError."""
    check_flag('resume', cfg.get('resume', False))
    loop = cfg.get('train_cfg') or {}
    for name in ('max_epochs', 'max_iters', 'val_interval'):
        if name in loop:
            check_int(f'train_cfg.{name}', loop[name], 1)
    for name, hook in (cfg.get('default_hooks') or {}).items():
        # mmengine divides by 0, and takes −1 as never.
        if hook and hook.get('interval', 1) != -1:
            check_int(
                f'default_hooks.{name}.interval, which -1 turns off,', hook.get('interval', 1), 1
            )
    for key in ('data_preprocessor', 'model.data_preprocessor'):
        for name, least in (('mean', None), ('std', 0)):
            for value in (_entry(cfg, key) or {}).get(name) or ():
                check_number(f'{key}.{name}', value, above=least)
    optimizer = _entry(cfg, 'optim_wrapper.optimizer')
    if optimizer:
        if 'lr' in optimizer:
            check_number('optim_wrapper.optimizer.lr', optimizer['lr'], 0)
        name = optimizer.get('type')
        scope = cfg.get('default_scope') or 'mmengine'
        import_scope(cfg)
        with OPTIMIZERS.switch_scope_and_registry(scope) as registry:
            if isinstance(name, str) and registry.get(name) is None:
                meant = get_close_matches(name, OPTIMIZERS.module_dict, n=1)
                hint = f'; did you mean {meant[0]!r}?' if meant else ''
                raise UserError(f'optim_wrapper.optimizer.type {name!r} is not an optimizer{hint}')
    check_parts(cfg)
    for split in ('train', 'val', 'test'):
        dataset = _entry(cfg, f'{split}_dataloader.dataset')
        if dataset:
            _check_dataset(f'{split}_dataloader.dataset', dataset)


def import_scope(cfg: Config) -> None:
    """Import mmpretrain for its configs; mmengine would only call its types unknown."""
    if cfg.get('default_scope') == 'mmpretrain':
        try:
            importlib.import_module('mmpretrain')
        except ImportError as error:
            raise UserError(f'mmpretrain cannot be imported: {error}') from error


def _entry(cfg: Any, key: str) -> Any:
    for part in key.split('.'):
        cfg = cfg.get(part) if isinstance(cfg, dict | Config) else None
    return cfg


def _check_dataset(key: str, dataset: ConfigDict) -> None:
    if 'dataset' in dataset:  # a wrapper, such as RepeatDataset
        _check_dataset(f'{key}.dataset', dataset['dataset'])
    needs_pipeline = 'pipeline' in dataset or type_name(dataset.get('type')).endswith(
        IMAGE_DATA_SETS
    )
    if needs_pipeline and not dataset.get('pipeline'):
        raise UserError(f'{key}.pipeline must have a step that packs a sample, got none')
    if isinstance(dataset.get('indices'), int | float | str):
        check_int(f'{key}.indices', dataset['indices'], 1)


def check_data(cfg: Config, *splits: str) -> None:
    """Check that the files and folders of the data sets of some splits exist, and the batch sizes."""
    for split in splits:
        loader = cfg.get(f'{split}_dataloader')
        if loader:
            _check_files(loader.dataset, f'{split}_dataloader.dataset')
            if 'batch_size' in loader:
                check_int(f'{split}_dataloader.batch_size', loader.batch_size, 1)


def _check_files(dataset: ConfigDict, key: str) -> None:
    if 'dataset' in dataset:  # a wrapper, such as RepeatDataset
        _check_files(dataset.dataset, f'{key}.dataset')
    for index, part in enumerate(dataset.get('datasets', ())):
        _check_files(part, f'{key}.datasets.{index}')
    if dataset.get('download'):
        return
    root, prefix, sources = _sources(dataset)
    for source in sources:
        missing = not os.path.exists(source)
        if missing or (os.path.isdir(source) and not os.listdir(source)):
            folder = os.environ.get('AFT_MM_DATA', 'data')
            raise UserError(
                f'{key} reads {source!r}, which {"does not exist" if missing else "is empty"}; put '
                'the data there'
                + (
                    f' or set AFT_MM_DATA (now {folder!r}) to the folder that holds the data sets'
                    if Path(source).is_relative_to(folder)
                    else ''
                )
            )
    if isinstance(prefix, str):
        _check_images(key, os.path.join(root, prefix), dataset)
    for kinds, check in ((BOXES, check_boxes), ('BaseSegDataset', check_masks)):
        if type_name(dataset.type).endswith(kinds) and (warning := check(key, root, dataset)):
            warn(f'{key}: {warning}')


def data_sources(cfg: Config) -> list[str]:
    """Return the files and folders that the data sets of a config read."""
    loaders = [cfg.get(f'{split}_dataloader') or {} for split in ('train', 'val', 'test')]
    datasets = [loader['dataset'] for loader in loaders if 'dataset' in loader]
    found: list[str] = []
    for dataset in datasets:  # grows by those in wrappers
        datasets += [dataset['dataset']] if 'dataset' in dataset else dataset.get('datasets', ())
        found += _sources(dataset)[2]
    return found


def _sources(dataset: ConfigDict) -> tuple[str, Any, list[str]]:
    """Return the root, the prefixes and all files and folders of a data set."""
    root = dataset.get('data_root') or ''
    prefix = dataset.get('data_prefix') or ''
    if not prefix and type_name(dataset.get('type')).endswith('ImageNet'):
        prefix = dataset.get('split') or ''
    prefixes = prefix.values() if isinstance(prefix, dict) else [prefix]
    files = [dataset.get(name) or '' for name in ('data_file', 'source_file', 'target_file')]
    # A compressed text is also found.
    files = [
        f'{path}.gz' if path and not os.path.exists(path) and os.path.exists(f'{path}.gz') else path
        for path in files
    ]
    sources = [
        root,
        *(os.path.join(root, path) for path in prefixes),
        os.path.join(root, dataset.get('ann_file') or ''),
        *files,
    ]
    return root, prefix, [source for source in sources if source and '://' not in source]


def _check_images(key: str, folder: str, dataset: ConfigDict) -> None:
    endings = tuple(dataset.get('extensions') or ())
    if (
        not type_name(dataset.type).endswith('CustomDataset')
        or dataset.get('ann_file')
        or not endings
    ):
        return
    images, others = find_images(Path(folder))
    listed = [name for name in images if name.lower().endswith(endings)]
    for name in {*images}.difference(listed):
        others[name] = os.path.splitext(name)[1] or 'without an ending'
    passed_over = not_read(others)
    if not listed:
        raise UserError(
            f'{key} reads {folder!r}, which holds no image in a folder of its class; '
            f'images are files that end in {", ".join(endings)}'
            + (passed_over and f'; {passed_over}')
        )
    classes = {name.partition('/')[0] for name in listed}
    unread = (name.partition('/')[0] for name in others if '/' in name)
    label = next((label for label in unread if label not in classes), None)
    if label is not None:
        raise UserError(
            f'{key} reads {folder!r}, which must hold images of {label!r} that are read; '
            f'{passed_over}'
        )
    if passed_over:
        warn(f'{key} reads {folder!r}: {passed_over}')
