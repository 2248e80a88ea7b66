"""The text of a config is read as it was written, whatever its names, paths and keys are."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.config.lazy import LazyObject

from aft_mm.cli.main import main
from aft_mm.config.reading import read_config
from aft_mm.config.texts import Literal, config_text, entry, literal, quotable, type_name

from .errors import stops
from .hostile_data import CODE, FOLDER, NAMES, NUMBER, save, write

TEXTS = [
    *NAMES,
    FOLDER,
    '',
    '\\',
    '\\{{',
    "it's",
    '"""',
    "'''",
    'a\nb',
    'é漢\u2028',
    '\ud800',
    '${HOME}',
]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not [*tmp_path.rglob('ran')]


def test_literals_are_the_text_between_quotes_of_any_kind():
    random.seed(0)
    letters = '{}\'"\\$:x7b\n é'
    for text in [*TEXTS, *(''.join(random.choices(letters, k=n % 9)) for n in range(2000))]:
        written = literal(text), f"'{Literal(text)}'", *(f'{q}{quotable(text)}{q}' for q in '\'"')
        assert [eval(one) for one in written] == [text] * 4
        assert not {*'{}\n'} & {*''.join(written)}
    assert eval(literal(Path('/a', FOLDER))) == f'/a/{FOLDER}'


def test_an_entry_of_the_text_in_a_checkpoint_is_read_without_running_it():
    values = dict(a=dict(keys={'b.c': dict(x=1), 'd': [2.0]}, n=None), b=[dict(type='A')])
    text = Config(values).pretty_text
    assert entry(text, 'a') == values['a'] and entry(text, 'b', list) == values['b']
    assert entry(text, 'b') == entry(text, 'c') == {}
    assert entry(text.replace("'A'", "open('ran', 'w')"), 'b', list) == []


def test_numbers_that_are_not_finite_are_written_as_expressions(here):
    inf = float('inf')
    values = dict(clip=dict(max_norm=inf, least=-inf), many=[inf, 1.5], none=float('nan'))
    Config(values).dump(here / 'own.py')
    read = Config.fromfile('own.py').to_dict()
    assert math.isnan(read.pop('none'))
    assert read == {key: values[key] for key in ('clip', 'many')}
    assert entry(Path('own.py').read_text(), 'clip') == values['clip']
    Config(dict(a=dict(x=float('nan'), y=np.float32(inf)))).dump(here / 'own.py')
    found = entry(Path('own.py').read_text(), 'a')
    assert math.isnan(found['x']) and found['y'] == inf


def test_imported_classes_of_a_config_in_pure_python_are_no_entries(here):
    Path('own.py').write_text(
        'from mmengine.optim import OptimWrapper\n'
        'from torch.optim import AdamW\n'
        'optim_wrapper = dict(type=OptimWrapper, optimizer=dict(type=AdamW, lr=1e-3))\n'
    )
    assert read_config('own.py').optim_wrapper.optimizer.lr == 1e-3


def test_a_written_config_is_read_with_the_same_values(here):
    values = dict(
        names=TEXTS,
        keys={text: text for text in TEXTS},
        nested=dict(one=(1, ('{{$QQ:x}}', {'{{': [dict(a='}}')]}), None), two={3: {'a b': 0.5}}),
        kinds={'{{$QQ:x}}'},
    )
    config = Config(values)
    config.merge_from_dict({'nested.three.4': '{{_base_.names}}'})  # as --cfg-options
    config.path = here / FOLDER
    config.dump(here / 'first.py')
    read = Config.fromfile('first.py')
    assert read.to_dict() == {**config.to_dict(), 'path': str(here / FOLDER)}
    assert {key: read[key] for key in ('names', 'keys', 'kinds')} == {
        key: values[key] for key in ('names', 'keys', 'kinds')
    }
    (here / 'second.py').write_text(read.pretty_text)
    assert read_config('second.py').to_dict() == read.to_dict()
    assert Config.fromfile('second.py').pretty_text == read.pretty_text


def test_texts_without_braces_are_written_as_by_mmengine():
    values = dict(a="it's", b=['é', 'a"b', '\\'], c={'d e': (1, None)})
    config = Config(values)
    config.text = 'which mmengine reserves'
    assert config_text(config, lambda config: repr(config.to_dict())) == repr(config.to_dict())
    assert config.a == "it's" and type(config.a) is str


@pytest.mark.parametrize('kind', ['image-folder', 'text', 'coco', 'voc', 'masks'])
def test_new_writes_neither_braces_nor_code_of_names(kind, here):
    (here / FOLDER).mkdir()
    root = here / FOLDER / FOLDER
    write(kind, root)
    main(['new', kind, str(root), '--out', 'my.py'])
    assert '{{' not in Path('my.py').read_text() and '}}' not in Path('my.py').read_text()
    config = Config.fromfile('my.py')
    if kind in ('coco', 'voc', 'masks'):
        assert list(config.classes) == config.train_dataloader.dataset.metainfo.classes == NAMES
    if kind == 'image-folder':
        assert Path('my_split/classes.txt').read_text().splitlines() == NAMES
    assert str(root) in (config.get('data_root'), config.get('data_file')) or (
        str(root) in str(config.dataset.get('data_prefix', config.dataset.data_root))
    )


def test_the_path_of_the_split_is_put_into_no_name(here):
    write('masks', here / 'masks')
    (here / FOLDER).mkdir()
    main(['new', 'masks', 'masks', '--out', f'{FOLDER}/my.py'])
    config = Config.fromfile(f'{FOLDER}/my.py')
    assert config.classes == NAMES and config.split == str(here / FOLDER / 'my_split')


def test_given_parts_are_named_by_their_paths(here):
    for part in ('train', 'val'):
        write('coco', here / FOLDER / part)
    main(['new', 'coco', FOLDER, '--out', 'my.py'])
    config = Config.fromfile('my.py')
    for part in ('train', 'val'):
        dataset = config[f'{part}_dataloader'].dataset
        assert dataset.ann_file == str(here / f'my_split/{part}.json')
        assert dataset.data_prefix.img == str(here / FOLDER)
        names = [
            image['file_name'] for image in json.loads(Path(dataset.ann_file).read_text())['images']
        ]
        assert len(names) == NUMBER and all(name.startswith(f'{part}/images/') for name in names)


def test_classes_of_masks_are_the_lines_of_the_file(here):
    write('masks', here / 'masks')
    names = ['a\u2028b', 'c\x0cd', *NAMES[2:]]
    (here / 'masks/classes.txt').write_text('\r\n'.join(names), newline='')
    main(['new', 'masks', 'masks'])
    assert Config.fromfile('masks.py').classes == names


@pytest.mark.parametrize('kind', ['image-folder', 'voc', 'masks'])
@pytest.mark.parametrize('end', ['\nb', '\udcff'])
def test_file_names_that_no_list_can_hold_are_refused(kind, end, here):
    write(kind, here / 'data')
    for path in [*here.rglob('0\u2028*')]:
        path.rename(path.with_name(path.name.replace('\u2028', end)))
    reason = 'in UTF-8' if end == '\udcff' else 'without a line break'
    stops(f'image .*/data/.* must have a name {reason}', main, ['new', kind, 'data'])
    assert not Path('data.py').exists() and not Path('data_split').exists()


def test_a_class_that_is_no_text_is_refused(here):
    write('coco', here / 'boxes')
    content = json.loads(Path('boxes/all.json').read_text())
    content['categories'][3]['name'] = 'a\ud800'
    Path('boxes/all.json').write_text(json.dumps(content))
    stops(r"the class 'a\\ud800' of '.*/boxes' must be in UTF-8", main, ['new', 'coco', 'boxes'])
    assert not Path('boxes.py').exists()


def test_names_do_not_write_to_the_terminal_what_it_would_obey(here, capsys):
    for name in ('cat', '\x1b]0;title\x07'):
        for number in range(2):
            save(here / f'photos/{name}/{number}.png')
    main(['new', 'image-folder', 'photos'])
    shown = capsys.readouterr().out
    assert '\x1b' not in shown and r"'\x1b]0;title\x07': 2 images" in shown


def test_copies_keep_the_names_of_folders_of_bases(here, capsys):
    base = here / f'$(mkdir ran){FOLDER}'
    base.mkdir()
    (base / 'base.py').write_text(f'model = dict(type={literal(FOLDER)})\n')
    (base / 'my.py').write_text("_base_ = ['base.py']\n")
    for number, words in enumerate([[], ['--keep-bases']]):
        out = f'{number} $(mkdir ran).py'
        main(['config', str(base / 'my.py'), '--out', out, *words])
        assert Config.fromfile(out).model.type == FOLDER
        assert f"`aft_mm train '{out}'`" in capsys.readouterr().out


def test_a_checkpoint_whose_config_would_be_replaced_is_not_published(here, tool):
    meta = dict(cfg=f"a = ['{{{{$QQ:x}}}}{CODE}']", experiment_name='a_20261122_080606')
    torch.save(dict(state_dict=dict(a=torch.ones(1)), meta=meta), 'old.pth')
    publish = tool('publish')
    words = ['old.pth', 'new.pth', '--license', 'MIT']
    stops(r"config in 'old.pth' must be as written by .*, got one with \{\{,", publish.main, words)
    assert not [*here.glob('new*')]


def test_a_type_is_named_whether_text_class_or_lazy():
    lazy = LazyObject('mmengine.hooks', 'CheckpointHook')
    for kind in ('CheckpointHook', 'mmengine.CheckpointHook', lazy, lazy.build()):
        assert type_name(kind) == 'CheckpointHook'
    assert type_name(LazyObject('torch').optim.AdamW) == 'AdamW'
    assert type_name(type_name) == 'type_name'
