"""Messages of a run about files that it cannot use or that are unusual."""

import logging
import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, RUNNERS
from mmengine.runner import Runner
from torch.utils.data import Dataset

from aft_mm.config.reading import check_data
from aft_mm.engine import SkippedDataReportHook
from aft_mm.engine.hooks.sanity import Notes
from aft_mm.errors import DATA_ERRORS, UserError, user_errors
from aft_mm.structures import SequenceSample

WARNING = 'a cloud of fewer than 8 points is sampled with replacement'


@pytest.fixture
def clouds(tmp_path):
    """Thirteen clouds: one is truncated, one holds NaN and two are of 5 points.

    One lies far from the origin and one is huge, and both can be used.
    """
    rng = np.random.default_rng(0)
    for split, sizes in dict(train=[10] * 11 + [5] * 2, val=[8, 5, 9]).items():
        folder = tmp_path / f'clouds/chair/{split}'
        folder.mkdir(parents=True)
        for index, size in enumerate(sizes):
            points = rng.standard_normal((size, 3))
            np.save(
                folder / f'{index}.npy', {9: points + 1e9, 10: points * 1e200}.get(index, points)
            )
    folder = tmp_path / 'clouds/chair/train'
    (folder / '3.npy').write_bytes((folder / '3.npy').read_bytes()[:200])
    np.save(folder / '7.npy', np.full((9, 3), np.nan))
    return tmp_path


@pytest.fixture
def runner(clouds, config, monkeypatch, request):
    monkeypatch.chdir(clouds)
    cfg = Config.fromfile(config('tiny_points'), import_custom_modules=False)
    cfg.pop('custom_imports')
    for name in ('losses', 'kill'):
        cfg.default_hooks.pop(name)
    cfg.train_dataloader.num_workers = cfg.val_dataloader.num_workers = request.param
    cfg.work_dir, cfg.experiment_name = 'work', request.node.name
    return RUNNERS.build(cfg)


def check_log(text):
    for epoch in (1, 2, 3):
        found = re.search(
            rf'train epoch {epoch}: 2 file\(s\) cannot be used, sampled (\d+) x and replaced by others:'
            r"\n  point cloud 'clouds/chair/train/3.npy' cannot be read: it is damaged or of "
            r'another kind than its name says \((\d+) x\)\n'
            r"  point cloud 'clouds/chair/train/7.npy' "
            r'cannot be used: points must be finite, but 9 of 9 are not \((\d+) x\)',
            text,
        )
        total, *each = map(int, found.groups())
        assert min(each) >= 1 and total == sum(each)
    assert len(re.findall(f'{WARNING}, the first one is .clouds/chair/train/1[12].npy', text)) == 1
    assert text.count(WARNING) == 1 and text.count('cannot be used, sampled') == 3


@pytest.mark.parametrize('runner', [0, 2], indirect=True, ids=['alone', 'workers'])
def test_a_run_continues_and_names_the_files_after_every_epoch(runner, clouds):
    runner.train()
    assert runner.iter == 12  # ⌈13 / 4⌉ batches in each epoch
    check_log(next(clouds.glob('work/*/*.log')).read_text())


@pytest.mark.parametrize('runner', [0, 1], indirect=True, ids=['alone', 'worker'])
def test_a_validation_over_a_corrupt_file_has_a_one_line_message(runner, clouds):
    path = clouds / 'clouds/chair/val/2.npy'
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SystemExit, match="^Error: point cloud 'clouds/chair/val/2.npy' cannot be"):
        with user_errors():
            runner.train()


def test_two_processes_name_the_files_of_both(clouds, run, root, config):
    words = '--launcher pytorch --no-validate --work-dir work --cfg-options'.split()
    words += ['default_hooks.checkpoint.save_best=None']
    script, env = root / 'tools/train.py', {'CUDA_VISIBLE_DEVICES': ''}
    result = run(script, config('tiny_points'), *words, cwd=clouds, env=env, ranks=2)
    assert result.returncode == 0, result.stderr
    check_log(next(clouds.glob('work/*/*.log')).read_text())


def test_missing_data_is_named_before_a_run(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = Config.fromfile(config('tiny_points'), import_custom_modules=False)
    with pytest.raises(UserError, match="train_dataloader.dataset reads 'clouds', which does not"):
        check_data(cfg, 'train')
    (tmp_path / 'clouds/chair/train').mkdir(parents=True)
    check_data(cfg, 'train')
    with pytest.raises(SystemExit, match="^Error: class 'chair' has no point cloud .*/train'$"):
        with user_errors(*DATA_ERRORS):
            DATASETS.build(cfg.train_dataloader.dataset)


def note(hook, run, mode='train', **metainfo):
    after_iter = getattr(hook, f'after_{mode}_iter')
    after_iter(run, 0, dict(data_samples=[SequenceSample(metainfo=metainfo)]))


def test_each_rank_adds_its_files_and_each_warning_is_logged_once(monkeypatch, caplog):
    run = SimpleNamespace(epoch=4, logger=logging.getLogger('report'))
    hook = SkippedDataReportHook()
    other = Notes(Counter({'b.png is damaged.': 2}), {'grey': 'z.png', 'tiny': 'y.png'})
    monkeypatch.setattr(
        'aft_mm.engine.hooks.sanity.all_gather_object', lambda notes: [notes, other]
    )
    note(hook, run, skipped=('a.png is damaged.', 'b.png is damaged.'))
    note(hook, run, warnings={'grey': 'c.png'})
    note(hook, run, warnings={'grey': 'd.png'}, skipped=('b.png is damaged.',))
    note(hook, run)
    with caplog.at_level(logging.WARNING):
        hook.after_train_epoch(run)
        assert caplog.messages == [
            'train epoch 5: 2 file(s) cannot be used, sampled 5 x and replaced by others:\n'
            '  a.png is damaged (1 x)\n  b.png is damaged (4 x)',
            "grey, the first one is 'c.png'",
            "tiny, the first one is 'y.png'",
        ]
        caplog.clear()
        hook.after_train_epoch(run)
        assert caplog.messages == [
            'train epoch 5: 1 file(s) cannot be used, sampled 2 x and replaced by others:\n'
            '  b.png is damaged (2 x)'
        ]


class Notebook(Dataset):
    metainfo = {}

    def __init__(self, sentence):
        self.sentence = sentence

    def __len__(self):
        return 4

    def __getitem__(self, index):
        metainfo = dict(skipped=(self.sentence,), warnings={f'{self.sentence} too': 'file'})
        return dict(inputs=torch.zeros(1), data_samples=SequenceSample(metainfo=metainfo))


class Silent(BaseModel):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, inputs, data_samples, mode):
        return dict(loss=self.weight * 0) if mode == 'loss' else data_samples


class Nothing(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results += data_samples

    def compute_metrics(self, results):
        return {}


@pytest.mark.parametrize(
    ('train_cfg', 'titles'),
    [
        # Validation follows its epoch, which is done then.
        (
            dict(by_epoch=True, max_epochs=2),
            ['train epoch 1: 4', 'val epoch 1: 4', 'train epoch 2: 4', 'val epoch 2: 4', 'test: 4'],
        ),
        # It takes place inside of the one epoch of such a loop, whose notes go on.
        (
            dict(by_epoch=False, max_iters=4, val_interval=2),
            ['val iteration 2: 4', 'val iteration 4: 4', 'train epoch 1: 4', 'test: 4'],
        ),
    ],
)
def test_every_loop_of_mmengine_reports_its_own_notes(tmp_path, train_cfg, titles):
    def loader(mode):
        return dict(
            dataset=Notebook(mode),
            sampler=dict(type='DefaultSampler', shuffle=False),
            batch_size=1,
            collate_fn=dict(type='pseudo_collate'),
        )

    runner = Runner(
        model=Silent(),
        work_dir=str(tmp_path),
        train_cfg=train_cfg,
        val_cfg={},
        test_cfg={},
        train_dataloader=loader('train'),
        val_dataloader=loader('val'),
        test_dataloader=loader('test'),
        val_evaluator=Evaluator([Nothing()]),
        test_evaluator=Evaluator([Nothing()]),
        default_scope='mmengine',
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.0)),
        custom_hooks=[SkippedDataReportHook()],
        experiment_name=f'report-{len(titles)}',
    )
    runner.train()
    runner.test()
    log = next(tmp_path.glob('*/*.log')).read_text()
    found = re.findall(r' - ([\w ]+): 1 file.* sampled\s+(\d) x.*\n  (\w+) \(\2 x\)', log)
    assert [f'{title}: {count}' for title, count, _ in found] == titles
    assert all(sentence in title for title, _, sentence in found)
    assert log.count('too, the first one is') == 3
