"""What a config says, looked at before anything is built of it or trained with it."""

import inspect
import json
import os
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import parse

from mmengine.config import Config, ConfigDict
from mmengine.registry import OPTIMIZERS
from mmengine.runner import Runner
from torch import nn

from aft_mm.checks import check_flag, check_int, check_number
from aft_mm.engine.hooks import PictureHook
from aft_mm.errors import UserError

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
#: Names that configs give to what they use further down, some of them much like those above.
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
#: Tests that draw from the model on their way.
DRAWING_LOOPS = ('GenerationTestLoop', 'TranslationTestLoop')
LIKE = 0.8  # of get_close_matches: two letters of ten


def check_keys(cfg: Config, options: Iterable[str] = ()) -> None:
    """Refuse a misspelt entry, without which a run would go on in silence.

    Args:
        cfg: The config; what it calls by names unlike those that are read is its own affair.
        options: The keys of ``--cfg-options``, which have to name what there is.

    Raises:
        UserError: an entry is almost the name of one that is read, or an option names none, or one
            that the config has read itself, such as ``train_pipeline``.
    """
    known = READ | SHARED
    for key in cfg:
        meant = get_close_matches(key, READ, n=1, cutoff=LIKE)
        if key not in known and meant:
            raise UserError(f'{key!r} of the config is read by nobody; did you mean {meant[0]!r}?')
    for option in options:
        key, _, rest = option.partition('.')
        if key not in known and key not in cfg:
            raise UserError(f'--cfg-options names {key!r}, which the config does not have')
        if key not in READ:
            read = {name: cfg[name] for name in READ & cfg.keys()}
            places = sorted(_places(key, cfg.get(key), read))[:3]
            there = ' and '.join(f'{place}.{rest}'.rstrip('.') for place in places)
            raise UserError(
                f'--cfg-options {option} changes nothing, as the config has used '
                f'{key!r} before; change {there or "the config"} instead'
            )


def _places(key: str, value: Any, tree: Any, at: str = '') -> Iterator[str]:
    """Where in a tree a value is used: whole lists and dicts anywhere, others under their name."""
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
    """Look at the numbers of a run: epochs, intervals, learning rate, normalisation.

    Raises:
        ValueError: one is out of range or no number.
        UserError: the optimizer is unknown, or a pipeline is empty.
    """
    check_flag('resume', cfg.get('resume', False))
    loop = cfg.get('train_cfg') or {}
    for name in ('max_epochs', 'max_iters', 'val_interval'):
        if name in loop:
            check_int(f'train_cfg.{name}', loop[name], 1)
    for name, hook in (cfg.get('default_hooks') or {}).items():
        # mmengine counts below 0 as never, and divides by 0.
        if hook and hook.get('interval', 1) != -1:
            check_int(
                f'default_hooks.{name}.interval, which -1 turns off,', hook.get('interval', 1), 1
            )
    for key in ('data_preprocessor', 'model.data_preprocessor'):
        _check_normalization(key, _entry(cfg, key) or {})
    optimizer = _entry(cfg, 'optim_wrapper.optimizer')
    if optimizer:
        _check_optimizer(optimizer, cfg.get('default_scope') or 'mmengine')
    for split in ('train', 'val', 'test'):
        dataset = _entry(cfg, f'{split}_dataloader.dataset')
        if dataset:
            _check_dataset(f'{split}_dataloader.dataset', dataset)


def _entry(cfg: Any, key: str) -> Any:
    """``cfg.a.b`` for ``'a.b'``, None where it is missing."""
    for part in key.split('.'):
        cfg = cfg.get(part) if isinstance(cfg, dict | Config) else None
    return cfg


def _check_normalization(key: str, preprocessor: ConfigDict) -> None:
    for name, least in (('mean', None), ('std', 0)):
        for value in preprocessor.get(name) or ():
            check_number(f'{key}.{name}', value, above=least)


def _check_optimizer(optimizer: ConfigDict, scope: str) -> None:
    if 'lr' in optimizer:
        check_number('optim_wrapper.optimizer.lr', optimizer['lr'], 0)
    name = optimizer.get('type')
    with OPTIMIZERS.switch_scope_and_registry(scope) as registry:
        if isinstance(name, str) and registry.get(name) is None:
            meant = get_close_matches(name, OPTIMIZERS.module_dict, n=1)
            hint = f'; did you mean {meant[0]!r}?' if meant else ''
            raise UserError(f'optim_wrapper.optimizer.type {name!r} is no optimizer{hint}')


def _check_dataset(key: str, dataset: ConfigDict) -> None:
    if 'dataset' in dataset:  # a wrapper, such as RepeatDataset
        _check_dataset(f'{key}.dataset', dataset['dataset'])
    if 'pipeline' in dataset and not dataset['pipeline']:
        raise UserError(f'{key}.pipeline must have a step that packs a sample, got none')
    if isinstance(dataset.get('indices'), int | float | str):
        check_int(f'{key}.indices', dataset['indices'], 1)


def check_images(key: str, folder: str, dataset: ConfigDict) -> None:
    """Refuse a folder of class folders in which nothing is called an image.

    Args:
        key: Of the dataset in the config.
        folder: That it reads.
        dataset: Of mmpretrain; another one than ``CustomDataset`` without a list is not looked at.

    Raises:
        UserError: no file has one of its ``extensions``.
    """
    endings = tuple(dataset.get('extensions') or ())
    if not dataset.type.endswith('CustomDataset') or dataset.get('ann_file') or not endings:
        return
    names = (name for _, _, files in os.walk(folder, followlinks=True) for name in files)
    if not any(name.lower().endswith(endings) for name in names):
        raise UserError(
            f'{key} reads {folder!r}, which holds no image in a folder of its class; '
            f'images are files that end in {", ".join(endings)}'
        )


def check_boxes(key: str, root: str, dataset: ConfigDict) -> None:
    """Refuse classes that mmdet would number otherwise than the config does, or find no box of.

    Args:
        key: Of the dataset in the config.
        root: Its folder.
        dataset: Of mmdet; one that lists no classes or reads another format is not looked at.

    Raises:
        UserError: a json file knows other categories or has them in another order, or no xml file
            has a box of a class.
    """
    classes = (dataset.get('metainfo') or {}).get('classes') or ()
    path = os.path.join(root, dataset.get('ann_file') or '')
    if isinstance(classes, str) or not classes or not os.path.isfile(path):
        return
    listed = f'{key}.metainfo.classes lists {", ".join(map(str, classes))}'
    if dataset.type.endswith('CocoDataset'):
        content = json.loads(Path(path).read_text())
        there = content.get('categories', ()) if isinstance(content, dict) else ()
        names = [category['name'] for category in there]
        if [name for name in names if name in classes] != list(classes):
            raise UserError(
                f'{listed}, which must be categories of {path!r} in its order, as mmdet numbers '
                f'them by that: {", ".join(names) or "it has none"}'
            )
    if dataset.type.endswith(('VOCDataset', 'XMLDataset')):
        prefix = (dataset.get('data_prefix') or {}).get('sub_data_root', '')
        folder = Path(root, prefix, dataset.get('ann_subdir', 'Annotations'))
        others: set[str] = set()
        for image in Path(path).read_text().splitlines():
            boxes = parse(folder / f'{image.strip()}.xml').iter('object')
            found = {box.findtext('name', '') for box in boxes}
            if found.intersection(classes):
                return
            others |= found
        raise UserError(
            f'{listed}, but the boxes of {path!r} are of other classes: '
            f'{", ".join(sorted(others)) or "there are none"}'
        )


def check_classes(model: nn.Module, dataset: Any, split: str) -> None:
    """Refuse a head with fewer classes than the data has.

    Raises:
        UserError: there are labels that no class stands for.
    """
    model = getattr(model, 'module', model)  # the one that a distributed run wraps
    metainfo = getattr(dataset, 'metainfo', None) or {}
    classes = metainfo.get('classes') or metainfo.get('units')  # of speech, the blank included
    for name in ('head', 'bbox_head', 'decode_head', 'auxiliary_head', 'roi_head.bbox_head'):
        head: Any = model
        for part in name.split('.'):
            head = getattr(head, part, None)
        number = getattr(head, 'num_classes', None)
        if classes is not None and isinstance(number, int) and number < len(classes):
            raise UserError(
                f'model.{name}.num_classes must be at least {len(classes)}, the number '
                f'of classes of the {split} set, got {number}'
            )


def check_same_classes(trained: Any, validated: Any) -> None:
    """Refuse sets that number their classes differently, as folders do where one is missing.

    Raises:
        UserError: a class has another number in the validation set, or none.
    """
    ours, theirs = (
        tuple((getattr(dataset, 'metainfo', None) or {}).get('classes') or ())
        for dataset in (trained, validated)
    )
    if ours and theirs and ours != theirs:
        differing = sorted({*map(str, ours)} ^ {*map(str, theirs)})
        what = (
            f'{", ".join(differing[:3])} {"is" if len(differing) == 1 else "are"} in one only'
            if differing
            else 'they stand in another order'
        )
        raise UserError(
            f'the training set has {len(ours)} classes and the validation set '
            f'{len(theirs)}, which must be the same in the same order: {what}'
        )


def check_steps(runner: Runner) -> None:
    """Refuse to draw from a model of a causal mixer that cannot take one token at a time.

    Where nothing in the config draws, the likelihood can be trained, and the log says what cannot.

    Raises:
        UserError: a hook or the test would draw.
    """
    without = next(
        (
            type(layer).__name__
            for layer in runner.model.modules()
            if getattr(layer, 'causal', False) and not getattr(layer, 'has_steps', True)
        ),
        None,
    )
    if without is None:
        return
    loop = (runner.cfg.get('test_cfg') or {}).get('type') or ''
    drawing = [type(hook).__name__ for hook in runner.hooks if isinstance(hook, PictureHook)]
    drawing += [name for name in DRAWING_LOOPS if name in str(loop)]
    what = f'{without} has no _init_state and _mix_step: nothing can be drawn from the model'
    if drawing:
        raise UserError(f'{what}, as {drawing[0]} of the config would')
    runner.logger.warning(what)
