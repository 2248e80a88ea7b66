"""Read a config, and check it before anything is built from it."""

import importlib
import inspect
import json
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn
from xml.etree.ElementTree import ParseError, parse

from mmengine.config import Config, ConfigDict
from mmengine.registry import OPTIMIZERS
from mmengine.runner import Runner

from aft_mm.checks import check_flag, check_int, check_number, described, is_int
from aft_mm.errors import UserError

from .finding import find_config

#: Scopes of the libraries that `make downstream` installs.
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
#: Names of intermediate variables in configs, some of them similar to those in READ.
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
#: Bounds of annotations: pixels of an image (Pillow's own is 179 million), and a coordinate [px].
MAX_PIXELS = 2**28
MAX_COORDINATE = 10**5
SIMILARITY = 0.8  # cutoff of get_close_matches: two of ten letters differ
#: Beginnings of library warnings that every run would show and no user can act on.
KNOWN_WARNINGS = (
    'pkg_resources is deprecated as an API',  # mmengine imports it to find mmdet and mmseg
    '``build_loss`` would be deprecated soon',  # mmseg calls its own function
    'Default ``avg_non_ignore`` is False',  # the value of mmseg's own configs
    'The draw is False, it means that the hook',  # from mmseg's default runtime
)


# Reading.


def read_config(path: str, options: Mapping[str, Any] | None = None) -> Config:
    """Execute a config file and merge ``--cfg-options`` into it.

    Args:
        path: Path of the config, or the name of a config of aft_mm.
        options: Values by dotted keys; None skips the check of keys as well.

    Raises:
        UserError: the file is not a Python file, fails when executed, or needs libraries that are
            not installed; an entry is misspelt, or an option has no effect.
    """
    path = find_config(path)
    ignore_known_warnings()
    try:
        with _quotable_data_folder():
            cfg = Config.fromfile(path)
        if cfg.get('default_scope') in DOWNSTREAM:  # else a type would only be called unknown
            importlib.import_module(f'{cfg.default_scope}.models')
    except ImportError as error:
        if not any(name in str(error) for name in (*DOWNSTREAM, 'mmcv')):
            raise UserError(
                f'config {path!r} imports a missing module: {error.__cause__ or error}'
            ) from error
        raise UserError(
            f'config {path!r} needs mmdet and mmseg ({error}), which `make downstream` installs'
        ) from error
    except RecursionError as error:
        raise UserError(f'config {path!r} has itself among its _base_') from error
    except Exception as error:  # a config is a program and may raise anything
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


def ignore_known_warnings() -> None:
    """Silence :data:`KNOWN_WARNINGS`; all other warnings are shown."""
    for beginning in KNOWN_WARNINGS:
        warnings.filterwarnings('ignore', re.escape(beginning), UserWarning)


@contextmanager
def _quotable_data_folder() -> Iterator[None]:
    """Escape AFT_MM_DATA, which mmengine pastes between quotes with ``re.sub``.

    ``re.sub`` needs every backslash twice.
    """
    folder = os.environ.get('AFT_MM_DATA')
    if folder is None:
        yield
        return
    escaped = re.sub(r'([\\\'"])', r'\\\1', folder).replace('\n', '\\n')
    os.environ['AFT_MM_DATA'] = escaped.replace('\\', '\\\\')
    try:
        yield
    finally:
        os.environ['AFT_MM_DATA'] = folder


# Checking.


def check_keys(cfg: Config, options: Iterable[str] = ()) -> None:
    """Refuse misspelt entries, which would otherwise be ignored silently.

    Args:
        cfg: The config; entries whose names are unlike all of READ are not checked.
        options: Keys of ``--cfg-options``, which must exist.

    Raises:
        UserError: an entry is almost the name of one in READ, or an option names a missing entry
            or one that the config has already used, such as ``train_pipeline``.
    """
    known = READ | SHARED
    for key in cfg:
        meant = get_close_matches(key, READ, n=1, cutoff=SIMILARITY)
        if key not in known and meant:
            raise UserError(f'{key!r} of the config is not used; did you mean {meant[0]!r}?')
    for option in options:
        key, _, rest = option.partition('.')
        if key not in known and key not in cfg:
            raise UserError(f'--cfg-options names {key!r}, which the config does not have')
        if key not in READ:
            read = {name: cfg[name] for name in READ & cfg.keys()}
            places = sorted(_places(key, cfg.get(key), read))[:3]
            there = ' and '.join(f'{place}.{rest}'.rstrip('.') for place in places)
            raise UserError(
                f'--cfg-options {option} has no effect, because the config has already used '
                f'{key!r}; change {there or "the config"} instead'
            )


def _places(key: str, value: Any, tree: Any, at: str = '') -> Iterator[str]:
    """Yield where a tree holds a value: lists and dicts anywhere, other values under their key."""
    items = (
        tree.items()
        if isinstance(tree, dict)
        else (enumerate(tree) if isinstance(tree, list) else ())
    )
    for name, part in items:
        place = f'{at}.{name}'.lstrip('.')
        if (
            part == value
            and value not in ({}, [])
            and (name == key or isinstance(value, dict | list))
        ):
            yield place
        else:
            yield from _places(key, value, part, place)


def check_settings(cfg: Config) -> None:
    """Check the numbers of a run: epochs, intervals, learning rate, normalisation.

    Raises:
        ValueError: a number is out of range.
        UserError: the optimizer is unknown, or a pipeline is empty.
    """
    check_flag('resume', cfg.get('resume', False))
    loop = cfg.get('train_cfg') or {}
    for name in ('max_epochs', 'max_iters', 'val_interval'):
        if name in loop:
            check_int(f'train_cfg.{name}', loop[name], 1)
    for name, hook in (cfg.get('default_hooks') or {}).items():
        # mmengine takes a negative interval as never, and divides by 0.
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
        with OPTIMIZERS.switch_scope_and_registry(scope) as registry:
            if isinstance(name, str) and registry.get(name) is None:
                meant = get_close_matches(name, OPTIMIZERS.module_dict, n=1)
                hint = f'; did you mean {meant[0]!r}?' if meant else ''
                raise UserError(f'optim_wrapper.optimizer.type {name!r} is not an optimizer{hint}')
    for split in ('train', 'val', 'test'):
        dataset = _entry(cfg, f'{split}_dataloader.dataset')
        if dataset:
            _check_dataset(f'{split}_dataloader.dataset', dataset)


def _entry(cfg: Any, key: str) -> Any:
    """Return ``cfg.a.b`` for ``'a.b'``, None if it is missing."""
    for part in key.split('.'):
        cfg = cfg.get(part) if isinstance(cfg, dict | Config) else None
    return cfg


def _check_dataset(key: str, dataset: ConfigDict) -> None:
    if 'dataset' in dataset:  # a wrapper, such as RepeatDataset
        _check_dataset(f'{key}.dataset', dataset['dataset'])
    if 'pipeline' in dataset and not dataset['pipeline']:
        raise UserError(f'{key}.pipeline must have a step that packs a sample, got none')
    if isinstance(dataset.get('indices'), int | float | str):
        check_int(f'{key}.indices', dataset['indices'], 1)


def check_checkpoint(path: str | None) -> None:
    """Refuse a checkpoint file that does not exist, before anything is built.

    Raises:
        UserError: ``path`` is neither a file nor an address.
    """
    if path and '://' not in path and not os.path.isfile(os.path.expanduser(path)):
        raise UserError(f'checkpoint {path!r} does not exist')


def check_data(cfg: Config, *splits: str) -> None:
    """Check that the files and folders of the data sets exist, and the batch sizes.

    Args:
        cfg: The config.
        splits: ``'train'``, ``'val'`` or ``'test'``.

    Raises:
        UserError: a file or folder is missing, or a folder is empty.
        ValueError: a batch size is out of range.
    """
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
    root = dataset.get('data_root') or ''
    prefix = dataset.get('data_prefix') or ''
    if not prefix and dataset.type.endswith('ImageNet'):
        prefix = dataset.get('split') or ''
    prefixes = prefix.values() if isinstance(prefix, dict) else [prefix]
    files = [dataset.get(name) or '' for name in ('data_file', 'source_file', 'target_file')]
    # A compressed text is read if there is no plain one.
    files = [
        f'{path}.gz' if path and not os.path.exists(path) and os.path.exists(f'{path}.gz') else path
        for path in files
    ]
    for place in [
        root,
        *(os.path.join(root, path) for path in prefixes),
        os.path.join(root, dataset.get('ann_file') or ''),
        *files,
    ]:
        if not place or '://' in place:
            continue
        missing = not os.path.exists(place)
        if missing or (os.path.isdir(place) and not os.listdir(place)):
            raise UserError(
                f'{key} reads {place!r}, which {"does not exist" if missing else "is empty"}; put '
                'the data there or set AFT_MM_DATA '
                f'(now {os.environ.get("AFT_MM_DATA", "data")!r}) to the folder that holds the '
                'data sets'
            )
    if isinstance(prefix, str):
        _check_images(key, os.path.join(root, prefix), dataset)
    _check_boxes(key, root, dataset)


def _check_images(key: str, folder: str, dataset: ConfigDict) -> None:
    """Refuse an mmpretrain CustomDataset whose class folders hold no image files."""
    endings = tuple(dataset.get('extensions') or ())
    if not dataset.type.endswith('CustomDataset') or dataset.get('ann_file') or not endings:
        return
    names = (name for _, _, files in os.walk(folder, followlinks=True) for name in files)
    if not any(name.lower().endswith(endings) for name in names):
        raise UserError(
            f'{key} reads {folder!r}, which holds no image in a folder of its class; '
            f'images are files that end in {", ".join(endings)}'
        )


def _check_boxes(key: str, root: str, dataset: ConfigDict) -> None:
    """Refuse damaged annotations of an mmdet data set, and classes that differ from theirs.

    mmdet numbers the classes of COCO by the order in the json file, and skips boxes of VOC with
    other classes.
    """
    classes = (dataset.get('metainfo') or {}).get('classes') or ()
    path = os.path.join(root, dataset.get('ann_file') or '')
    if not dataset.get('ann_file') or not os.path.isfile(path):
        return
    content = _read_coco(path) if dataset.type.endswith('CocoDataset') else {}
    if isinstance(classes, str) or not classes:
        return
    listed = f'{key}.metainfo.classes lists {", ".join(map(str, classes))}'
    if dataset.type.endswith('CocoDataset'):
        names = [category['name'] for category in content.get('categories', ())]
        if [name for name in names if name in classes] != list(classes):
            raise UserError(
                f'{listed}, which must be categories of {path!r} in its order, as mmdet numbers '
                f'them by that: {", ".join(names) or "it has none"}'
            )
    if dataset.type.endswith(('VOCDataset', 'XMLDataset')):
        prefix = (dataset.get('data_prefix') or {}).get('sub_data_root', '')
        folder = Path(root, prefix, dataset.get('ann_subdir', 'Annotations'))
        others: set[str] = set()
        for image in _read_text(path).splitlines():
            place = folder / f'{image.strip()}.xml'
            if place.exists() and not place.is_file():  # on a pipe, reading would wait for ever
                raise UserError(f'boxes {str(place)[:300]!r} is not a regular file')
            try:
                found = {box.findtext('name', '') for box in parse(place).iter('object')}
            except (ParseError, OSError, ValueError) as error:
                reason = getattr(error, 'strerror', None) or ' '.join(str(error).split())
                raise UserError(f'boxes {str(place)[:300]!r} cannot be read: {reason}') from error
            if found.intersection(classes):
                return
            others |= found
        raise UserError(
            f'{listed}, but the boxes of {path!r} are of other classes: '
            f'{", ".join(sorted(others)) or "there are none"}'
        )


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding='utf-8')
    except UnicodeDecodeError as error:
        raise UserError(f'{path!r} is not valid UTF-8 in byte {error.start}') from error


def _read_coco(path: str) -> dict:
    """Read annotations of COCO, and check what mmdet and pycocotools believe.

    Raises:
        UserError: the file is damaged, an image has no local name or too many pixels, or a box or
            mask does not fit its image.
    """
    try:
        content = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        reason = ' '.join(str(error).split())
        raise UserError(f'annotations {path!r} cannot be read: {reason:.200}') from error
    parts = [
        content.get(name, []) if isinstance(content, dict) else None
        for name in ('categories', 'images', 'annotations')
    ]
    for part in parts:
        if not isinstance(part, list) or not all(isinstance(entry, dict) for entry in part):
            raise UserError(
                f'annotations {path!r} must be a dict with lists of images, annotations and '
                'categories'
            )
    categories, images, annotations = parts

    def refuse(kind: str, entry: dict, reason: str) -> NoReturn:
        raise UserError(f'{kind} {described(entry.get("id"))} of {path!r} {reason}')

    for category in categories:
        if not isinstance(category.get('name'), str):
            refuse('category', category, 'has no name')
    sizes = {}
    for image in images:
        name, size = image.get('file_name'), (image.get('height'), image.get('width'))
        if not isinstance(name, str) or not name or '://' in name or '\0' in name:
            refuse('image', image, f'must have the name of a local file, got {described(name)}')
        if not all(is_int(side) and side > 0 for side in size) or size[0] * size[1] > MAX_PIXELS:
            refuse('image', image, f'must have a height and width, got {described(size)}')
        if not isinstance(image.get('id'), int | str):
            refuse('image', image, 'has no id')
        sizes[image['id']] = size
    for annotation in annotations:
        key = annotation.get('image_id')
        if not isinstance(key, int | str):
            refuse('annotation', annotation, f'must have the id of an image, got {described(key)}')
        if key not in sizes or annotation.get('ignore'):  # mmdet skips them too
            continue
        if not isinstance(annotation.get('area'), int | float):
            refuse('annotation', annotation, 'has no area')
        problem = _box_problem(annotation.get('bbox')) or _mask_problem(
            annotation.get('segmentation') or [], sizes[key]
        )
        if problem:
            refuse('annotation', annotation, problem)
    return content


def _are_numbers(values: Any) -> bool:
    """Return whether a value is a list of numbers of a plausible size for coordinates in pixels."""
    return isinstance(values, list) and all(
        type(value) in (int, float) and -MAX_COORDINATE <= value <= MAX_COORDINATE
        for value in values
    )


def _box_problem(box: Any) -> str:
    if _are_numbers(box) and len(box) == 4:
        return ''
    return f'must have a box of four numbers of at most {MAX_COORDINATE:,}, got {described(box)}'


def _mask_problem(mask: Any, size: tuple[int, int]) -> str:
    """Return why a mask, polygons or run lengths, does not fit an image; '' if it does."""
    if isinstance(mask, list):
        if all(map(_are_numbers, mask)):
            return ''
        return f'must have polygons, lists of numbers of at most {MAX_COORDINATE:,}'
    counts = mask.get('counts') if isinstance(mask, dict) else None
    if not isinstance(counts, str | list):
        return f'must have polygons or run lengths, got {described(mask)}'
    if mask.get('size') != list(size):
        return f'must have run lengths of size {list(size)}, got {described(mask.get("size"))}'
    if isinstance(counts, list) and not (
        all(is_int(count) and count >= 0 for count in counts) and sum(counts) == size[0] * size[1]
    ):
        return f'must have run lengths that sum to {size[0] * size[1]:,}'
    return ''
