"""What a run says about files that it cannot use or that are unusual."""

import logging
import re
from types import SimpleNamespace

import numpy as np
import pytest
from mmengine.config import Config
from mmengine.registry import DATASETS, RUNNERS

from aft_mm.engine import DataReportHook
from aft_mm.engine.command_line import DATA_ERRORS, check_data
from aft_mm.engine.errors import UserError, one_sentence
from aft_mm.structures import SequenceSample

REMARK = 'a cloud of fewer than 8 points is drawn from with replacement'


@pytest.fixture
def clouds(tmp_path):
    """Thirteen clouds, of which one is truncated, one holds NaN and two are of 5 points."""
    rng = np.random.default_rng(0)
    for split, sizes in dict(train=[10] * 11 + [5] * 2, val=[8, 5, 9]).items():
        folder = tmp_path / f'clouds/chair/{split}'
        folder.mkdir(parents=True)
        for index, size in enumerate(sizes):
            np.save(folder / f'{index}.npy', rng.standard_normal((size, 3)))
    folder = tmp_path / 'clouds/chair/train'
    (folder / '3.npy').write_bytes((folder / '3.npy').read_bytes()[:200])
    np.save(folder / '7.npy', np.full((9, 3), np.nan))
    return tmp_path


@pytest.fixture
def runner(clouds, config, monkeypatch, request):
    """A run of two epochs over the clouds, with or without workers."""
    monkeypatch.chdir(clouds)
    cfg = Config.fromfile(config('tiny_points'), import_custom_modules=False)
    cfg.pop('custom_imports')
    for name in ('losses', 'kill'):  # the hooks of the tests
        cfg.default_hooks.pop(name)
    cfg.train_dataloader.num_workers = cfg.val_dataloader.num_workers = request.param
    cfg.work_dir, cfg.experiment_name = 'work', request.node.name
    return RUNNERS.build(cfg)


def check_log(text):
    """Both epochs name both files; the remark is made once, in spite of four clouds."""
    for epoch in (1, 2):
        found = re.search(
            rf'train epoch {epoch}: 2 file\(s\) cannot be used, drawn (\d+) x, others took their '
            r"place:\n  point cloud 'clouds/chair/train/3.npy' cannot be read: ValueError: .* "
            r"\((\d+) x\)\n  point cloud 'clouds/chair/train/7.npy' cannot be used: points must be "
            r'finite, but 9 of 9 are not\. \((\d+) x\)', text)
        total, *each = map(int, found.groups())
        assert min(each) >= 1 and total == sum(each)
    assert len(re.findall(f'{REMARK}, the first one is .clouds/chair/train/1[12].npy', text)) == 1
    assert text.count(REMARK) == 1 and text.count('cannot be used, drawn') == 2


@pytest.mark.parametrize('runner', [0, 2], indirect=True, ids=['alone', 'workers'])
def test_a_run_goes_on_and_names_the_files_at_the_end_of_every_epoch(runner, clouds):
    runner.train()
    assert runner.iter == 8  # ⌈13 / 4⌉ batches in each epoch
    check_log(next(clouds.glob('work/*/*.log')).read_text())


@pytest.mark.parametrize('runner', [0, 1], indirect=True, ids=['alone', 'worker'])
def test_a_validation_over_a_corrupt_file_ends_in_one_sentence(runner, clouds):
    path = clouds / 'clouds/chair/val/2.npy'
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SystemExit, match="^Error: point cloud 'clouds/chair/val/2.npy' cannot be"):
        with one_sentence():
            runner.train()


@pytest.mark.slow
def test_two_processes_name_the_files_of_both(clouds, run, root, config):
    result = run('bash', root / 'tools/dist_train.sh', config('tiny_points'), 2, '--no-validate',
                 '--work-dir', 'work', '--cfg-options', 'default_hooks.checkpoint.save_best=None',
                 cwd=clouds, env={'CUDA_VISIBLE_DEVICES': ''})
    assert result.returncode == 0, result.stderr
    check_log(next(clouds.glob('work/*/*.log')).read_text())


def test_missing_data_is_named_before_a_run(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = Config.fromfile(config('tiny_points'), import_custom_modules=False)
    with pytest.raises(UserError, match="train_dataloader.dataset reads 'clouds', which does not"):
        check_data(cfg, 'train')
    (tmp_path / 'clouds/chair/train').mkdir(parents=True)
    check_data(cfg, 'train')
    with pytest.raises(SystemExit, match="^Error: class 'chair' has no point cloud .*/train'.$"):
        with one_sentence(*DATA_ERRORS):
            DATASETS.build(cfg.train_dataloader.dataset)
    (tmp_path / 'img_align_celeba').mkdir()
    with pytest.raises(SystemExit, match='^Error: .*list_eval_partition.txt of CelebA does not'):
        with one_sentence(*DATA_ERRORS):
            DATASETS.build(dict(type='aft_mm.CelebA', data_root=str(tmp_path)))


def test_each_rank_adds_its_files_and_each_remark_is_made_once(monkeypatch, caplog):
    logger = logging.getLogger('report')
    run = SimpleNamespace(epoch=4, logger=logger)
    hook = DataReportHook()

    def note(**metainfo):
        hook.after_train_iter(run, 0, dict(data_samples=[SequenceSample(metainfo=metainfo)]))

    monkeypatch.setattr(
        'aft_mm.engine.hooks.data_report_hook.all_gather_object',
        lambda notes: [notes, ({'b is damaged': 2}, {'grey': 'z.png', 'tiny': 'y.png'})])
    note(skipped=('a is damaged', 'b is damaged'))
    note(remarks={'grey': 'c.png'})
    note(remarks={'grey': 'd.png'}, skipped=('b is damaged', ))
    note()
    with caplog.at_level(logging.WARNING):
        hook.after_train_epoch(run)
        assert caplog.messages == [
            'train epoch 5: 2 file(s) cannot be used, drawn 5 x, others took their place:\n'
            '  a is damaged (1 x)\n  b is damaged (4 x)', "grey, the first one is 'c.png'",
            "tiny, the first one is 'y.png'"
        ]
        caplog.clear()
        hook.after_val_epoch(run)
        assert caplog.messages == [
            'val epoch 5: 1 file(s) cannot be used, drawn 2 x, others took their place:\n'
            '  b is damaged (2 x)'
        ]
