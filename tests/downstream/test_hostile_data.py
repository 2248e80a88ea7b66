"""Names of data enter a config as text: `aft_mm new`, what a training writes, copies, publication."""

import pytest
import torch
from mmengine.config import Config

from aft_mm.checkpoint import load_from_local
from aft_mm.config.reading import read_config

from ..helpers import WITHOUT_WORKERS, nightly
from ..hostile_data import FOLDER, NAMES, write

pytestmark = pytest.mark.slow

EPOCH = ['train_cfg.max_epochs=1', 'train_cfg.val_interval=1', 'param_scheduler=None']
SHORT = {
    'image-folder': EPOCH,
    'coco': EPOCH,
    'voc': EPOCH,
    'masks': ['train_cfg.max_iters=2', 'train_cfg.val_interval=2', 'train_dataloader.batch_size=2'],
    'text': ['train_cfg.max_epochs=1', 'train_dataloader.dataset.samples_per_epoch=16'],
}


def check(config, kind, root):
    dataset = config.train_dataloader.dataset
    if kind in ('coco', 'voc', 'masks'):
        assert list(dataset.metainfo.classes) == NAMES
    if kind == 'coco':
        assert dataset.data_prefix.img == str(root / 'images')
    else:
        assert dataset['data_file' if kind == 'text' else 'data_root'] == str(root)


def names_of_the_run(checkpoint):
    meta = checkpoint['meta']
    assert '{{' not in meta['cfg']
    return list(meta['dataset_meta'].get('classes') or ()), Config.fromstring(meta['cfg'], '.py')


@pytest.mark.parametrize('kind', nightly(SHORT, lambda kind: kind != 'image-folder'))
def test_names_are_no_code(kind, tool, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv('AFT_MM_DATA', raising=False)
    here = tmp_path / FOLDER
    here.mkdir()
    monkeypatch.chdir(here)
    root, work = here / FOLDER, f'work {FOLDER}'
    write(kind, root)
    tool('new').main([kind, FOLDER, *([] if kind == 'text' else ['--val', '0.5'])])
    (path,) = here.glob('*.py')
    for read in (read_config, Config.fromfile):
        config = read(str(path))
        check(config, kind, root)
        assert kind == 'text' or config.split == str(path.with_name(f'{path.stem}_split'))

    options = ['default_hooks.logger.interval=1', f'visualizer.name=hostile-{kind}', *SHORT[kind]]
    tool('train').main([str(path), '--work-dir', work, '--cfg-options', *options, *WITHOUT_WORKERS])
    saved = here / work / path.name
    names = [] if kind == 'text' else NAMES
    for place in (here / work).rglob('*.py'):
        assert '{{' not in place.read_text()
        check(Config.fromfile(place), kind, root)
    (last,) = (here / work).glob('[ei]*_[0-9]*.pth')
    trained = torch.load(last, weights_only=False)
    found, config = names_of_the_run(trained)
    assert found == names and config.work_dir == work
    check(config, kind, root)
    assert '{{' not in trained['message_hub']['runtime_info'].get('cfg', '')
    tool('train').main([str(saved), '--work-dir', work, '--resume'])
    tool('test').main([str(saved), str(last), '--work-dir', 'tested'])
    check(Config.fromfile(here / f'tested/{path.name}'), kind, root)

    tool('config').main([str(path), '--out', 'copy.py'])
    tool('config').main([str(path), '--keep-bases', '--out', f'copies {FOLDER}/kept.py'])
    for copy in ('copy.py', f'copies {FOLDER}/kept.py'):
        check(Config.fromfile(copy), kind, root)
    capsys.readouterr()
    publish = tool('publish')
    publish.main([str(last), 'published.pth', '--license', 'MIT'])
    for file in capsys.readouterr().out.split():
        found, config = names_of_the_run(load_from_local(file))
        assert found == names
        check(config, kind, root)
    assert not [*tmp_path.rglob('ran')]
