"""--resume over damaged, foreign and hostile training state; the tiny run has 3 epochs of 6."""

import logging
import os
import shutil
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mmengine.config import Config
from mmengine.logging import HistoryBuffer, MessageHub
from mmengine.registry import RUNNERS

from aft_mm.checkpoint import (
    checkpoints_in,
    load_from_local,
    remove_parts,
    write_pointer,
)
from aft_mm.engine import SafeCheckpointHook
from aft_mm.engine.preflight import choose_checkpoint
from aft_mm.engine.run_guard import Run
from aft_mm.outputs import write_whole

from ..errors import stops

pytestmark = [pytest.mark.adversarial, pytest.mark.slow]


@pytest.fixture
def train(tool, config, monkeypatch):
    def call(folder, *words, resume=None, name='tiny_without_chance'):
        monkeypatch.chdir(folder)
        flag = [] if resume is None else ['--resume', *filter(None, [resume])]
        tool('train').main(
            [
                config(name),
                '--work-dir',
                '.',
                '--no-validate',
                *flag,
                '--cfg-options',
                'train_dataloader.num_workers=0',
                f'experiment_name=run-{folder.name}',
                *words,
            ]
        )
        (log, *_) = sorted(folder.glob('*/*.log'), reverse=True)
        return log.read_text()

    return call


def train_whole(folder, config, root, **hooks):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root / 'tests/configs'))
        cfg = Config.fromfile(config('tiny_without_chance'))
        cfg.update(work_dir=str(folder), experiment_name=folder.name)
        cfg.update(val_cfg=None, val_dataloader=None, val_evaluator=None)
        cfg.train_dataloader.update(num_workers=0, persistent_workers=False)
        cfg.default_hooks.update(hooks)
        RUNNERS.build(cfg).train()
    return folder


@pytest.fixture(scope='module')
def whole_run(tmp_path_factory, root, config):
    return train_whole(tmp_path_factory.mktemp('whole'), config, root)


@pytest.fixture
def stopped(whole_run, tmp_path):
    """The folder of the same run as if it had ended after two epochs."""
    for epoch in (1, 2):
        shutil.copy(whole_run / f'epoch_{epoch}.pth', tmp_path)
    (tmp_path / 'last_checkpoint').write_text('epoch_2.pth')
    return tmp_path


def change(path, edit):
    checkpoint = torch.load(path, weights_only=True)
    edit(checkpoint)
    torch.save(checkpoint, path)


def assert_same_weights(one, other):
    one, other = (load_from_local(str(path)) for path in (one, other))
    for part in ('state_dict', 'ema_state_dict'):
        for key, value in one[part].items():
            assert torch.equal(value, other[part][key]), key
    assert str(one['optimizer']) == str(other['optimizer'])


def kinds(value):
    if isinstance(value, dict):
        return {type(value)}.union(*map(kinds, value), *map(kinds, value.values()))
    if isinstance(value, list | tuple):
        return {type(value)}.union(*map(kinds, value))
    return {type(value)}


def test_what_is_saved_are_plain_types(whole_run):
    checkpoint = torch.load(whole_run / 'epoch_3.pth', weights_only=True)
    plain = {dict, OrderedDict, list, tuple, str, int, float, bool, type(None), torch.Tensor}
    assert kinds(checkpoint) <= plain
    scalars = load_from_local(str(whole_run / 'epoch_3.pth'))['message_hub']['log_scalars']
    assert all(isinstance(history, HistoryBuffer) for history in scalars.values())
    assert len(scalars['train/loss'].data[0]) == 18
    assert not list(whole_run.glob('.*'))


@pytest.mark.parametrize('moment', ['write', 'fsync', 'replace'])
def test_a_kill_at_any_moment_of_writing_leaves_what_was_there(moment, tmp_path, monkeypatch):
    write_pointer(tmp_path, 'epoch_1.pth')

    def killed(*args):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        if moment != 'write':
            patch.setattr(f'os.{moment}', killed)
        patch.setattr(Path, 'unlink', lambda *args, **options: None)  # nobody tidies up
        with write_whole(tmp_path / 'last_checkpoint') as file:
            file.write(b'epoch_2.p')
            if moment == 'write':
                killed()
    assert (tmp_path / 'last_checkpoint').read_text() == 'epoch_1.pth'
    with pytest.raises(OSError, match='epoch_2.pth'), write_whole(tmp_path / 'epoch_2.pth'):
        raise OSError(28, 'No space left on device')
    (tmp_path / '.epoch_2.pth.17.part').touch()
    (tmp_path / '.last_checkpoint.17.part').touch()
    remove_parts(tmp_path)
    assert not list(tmp_path.glob('*epoch_2*')) and not list(tmp_path.glob('.*.part'))
    assert checkpoints_in(tmp_path) == []


DAMAGES = {
    'missing': lambda pointer: pointer.unlink(),
    'empty': lambda pointer: pointer.write_text(''),
    'binary': lambda pointer: pointer.write_bytes(b'\xff\xfe\x00\x80'),
    'nowhere': lambda pointer: pointer.write_text('elsewhere/epoch_7.pth'),
    'half a name': lambda pointer: pointer.write_text('epoch_2'),
    'a damaged file': lambda pointer: (
        shutil.copy('epoch_2.pth', 'epoch_10.pth'),
        pointer.write_text('epoch_10.pth'),
        Path('epoch_10.pth').write_bytes(Path('epoch_10.pth').read_bytes()[:9000]),
    ),
}


@pytest.mark.parametrize('name', DAMAGES)
def test_the_newest_whole_checkpoint_serves_and_is_named(
    name, train, stopped, whole_run, monkeypatch
):
    monkeypatch.chdir(stopped)
    DAMAGES[name](stopped / 'last_checkpoint')
    said = "the run resumes from 'epoch_2.pth', the newest complete checkpoint"
    cfg = Config(dict(resume=True, work_dir='.'))
    assert said in choose_checkpoint(cfg) and cfg.load_from == 'epoch_2.pth'
    if name != 'a damaged file':
        return
    assert said in train(stopped, resume='')
    assert_same_weights(stopped / 'epoch_3.pth', whole_run / 'epoch_3.pth')
    assert (stopped / 'last_checkpoint').read_text() == str(stopped / 'epoch_3.pth')


def test_checkpoints_of_which_none_is_whole_are_not_trained_over(train, stopped):
    before = {}
    for path in stopped.glob('*.pth'):
        path.write_bytes(path.read_bytes()[:5000])
        before[path] = path.read_bytes()
    message = (
        'finds no complete checkpoint in .*: the checkpoint named by .*last_checkpoint. cannot'
    )
    stops(f'--resume {message} be used .* damaged', train, stopped, resume='')
    assert before == {path: path.read_bytes() for path in stopped.glob('*.pth')}


def test_an_empty_folder_is_not_trained_in(train, tmp_path):
    stops('--resume finds no checkpoint in .*; name the --work-dir', train, tmp_path, resume='')
    assert not list(tmp_path.glob('*.pth'))


def test_auto_starts_in_an_empty_folder_and_refuses_damaged_files(train, tmp_path, whole_run):
    train(tmp_path, resume='auto')
    assert_same_weights(tmp_path / 'epoch_3.pth', whole_run / 'epoch_3.pth')
    log = train(tmp_path, resume='auto')
    assert 'the run is finished (epoch 3 of 3)' in log
    for path in tmp_path.glob('*.pth'):
        path.write_bytes(path.read_bytes()[:5000])
    stops('--resume finds no complete checkpoint in .* damaged', train, tmp_path, resume='auto')


@pytest.mark.parametrize('found', [True, False])
def test_auto_keeps_the_weights_to_start_from(found, stopped, tmp_path_factory):
    folder = stopped if found else tmp_path_factory.mktemp('empty')
    cfg = Config(dict(resume='auto', load_from='weights.pth', work_dir=str(folder)))
    (stopped / 'last_checkpoint').write_text(str(stopped / 'epoch_2.pth'))
    choose_checkpoint(cfg)
    expected = (True, str(stopped / 'epoch_2.pth')) if found else (False, 'weights.pth')
    assert (cfg.resume, cfg.load_from) == expected


def test_a_finished_run_says_so(train, stopped, whole_run):
    shutil.copy(whole_run / 'epoch_3.pth', stopped)
    log = train(stopped, resume='epoch_3.pth')
    assert 'the run is finished (epoch 3 of 3): nothing is left to train' in log
    assert 'schedule of the checkpoint' not in log
    assert 'Epoch(train)' not in log


@pytest.mark.parametrize('epoch', [2, 3])
def test_a_longer_run_says_that_its_schedule_stays(epoch, train, stopped, whole_run):
    shutil.copy(whole_run / 'epoch_3.pth', stopped)
    log = train(stopped, 'train_cfg.max_epochs=4', resume=f'epoch_{epoch}.pth')
    said = (
        'train_cfg.max_epochs is 4, but the schedule of the checkpoint is that of 3; for a longer'
    )
    assert said in log
    assert (stopped / 'epoch_4.pth').exists()


def test_checkpoints_elsewhere_stay_as_few_as_asked_for(train, tmp_path):
    words = f'default_hooks.checkpoint.out_dir={tmp_path}/elsewhere'
    words = words, 'default_hooks.checkpoint.max_keep_ckpts=1'
    (folder := tmp_path / 'run').mkdir()
    train(folder, *words, 'train_cfg.max_epochs=1')
    (first,) = (tmp_path / 'elsewhere').rglob('epoch_1.pth')
    shutil.copy(first, folder / 'iter_6.pth')  # of a stop
    log = train(folder, *words, resume='iter_6.pth')
    assert 'keep_ckpt_ids' not in log
    assert {path.name for path in first.parent.glob('*.pth')} == {'epoch_3.pth'}


def test_a_new_run_in_a_used_folder_is_announced_and_not_taken_for_the_old_one(train, stopped):
    log = train(stopped, 'train_cfg.max_epochs=1', 'default_hooks.checkpoint.interval=2')
    assert "work_dir '.' has checkpoints of an earlier run; this new one replaces" in log
    (stopped / 'last_checkpoint').write_text('none')  # as if killed in its first epoch
    assert not choose_checkpoint(cfg := Config(dict(resume='auto', work_dir=str(stopped))))
    assert not cfg.resume
    stops('finds no checkpoint of the last run in .*; name one of an', train, stopped, resume='')


def test_the_pointer_of_a_new_run_names_none_of_the_old(stopped):
    runner = SimpleNamespace(work_dir=str(stopped), message_hub=MessageHub.get_instance('new'))
    runner.__dict__.update(iter=0, cfg={}, logger=logging.getLogger('new'))
    hook = SafeCheckpointHook(interval=1)
    hook.before_train(runner)
    assert (stopped / 'last_checkpoint').read_text() == 'epoch_2.pth'  # nothing is trained yet
    hook.after_train_iter(runner, 0)
    assert (stopped / 'last_checkpoint').read_text() == 'none'


def test_a_copied_folder_resumes_from_its_own_files(stopped, tmp_path_factory):
    copy = tmp_path_factory.mktemp('copy')
    (stopped / 'last_checkpoint').write_text(str(stopped / 'epoch_2.pth'))
    shutil.copytree(stopped, copy, dirs_exist_ok=True)
    choose_checkpoint(cfg := Config(dict(resume=True, work_dir=str(copy))))
    assert cfg.load_from == str(copy / 'epoch_2.pth')
    (stopped / 'last_checkpoint').unlink()  # as in out_dir of a checkpoint hook
    choose_checkpoint(cfg := Config(dict(resume=True, work_dir=str(copy))))
    assert cfg.load_from == str(stopped / 'epoch_2.pth')


def test_one_training_at_a_time_writes_to_a_folder(train, stopped):
    code = 'import fcntl, sys; file = open(".lock", "a"); fcntl.lockf(file, fcntl.LOCK_EX)\n'
    code += 'print("process 7 on here", file=file, flush=True); print(flush=True); input()'
    other = subprocess.Popen(
        [sys.executable, '-c', code], cwd=stopped, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with other:
        other.stdout.readline()
        stops(r'in use by another training \(process 7 on here\)', train, stopped, resume='')
        other.communicate(b'\n')
    train(stopped, resume='')
    assert f'process {os.getpid()} on' in (stopped / '.lock').read_text()


@pytest.mark.parametrize(
    'launcher, rank, claims', [('none', '1', True), ('pytorch', '0', True), ('slurm', '1', False)]
)
def test_the_first_process_locks_the_folder(launcher, rank, claims, tmp_path, monkeypatch):
    monkeypatch.setenv('RANK', rank)
    (run := Run([])).claim(str(tmp_path / 'work'), launcher)
    run.release()
    assert (tmp_path / 'work/.lock').exists() == claims


@pytest.mark.parametrize(
    'save_best, name, moved, start, kept',
    [
        ('acc', 'best_acc_epoch_2.pth', False, '', True),
        ('acc', 'best_acc_epoch_2.pth', True, '', True),
        ('acc', 'best_acc_epoch_2.pth', True, 'elsewhere/epoch_3.pth', False),
        ('acc', 'best_acc_epoch_9.pth', True, '', False),  # which is not here
        ('acc', 'best_acc_epoch_9.pth', False, '', False),
        ('f1', 'best_acc_epoch_2.pth', False, '', False),
    ],
)
def test_the_best_score_counts_with_its_file_and_metric(
    save_best, name, moved, start, kept, tmp_path
):
    (tmp_path / 'best_acc_epoch_2.pth').touch()
    hub = MessageHub.get_instance(f'best-{save_best}-{name}-{moved}-{start}')
    hub.update_info('best_ckpt', str((tmp_path / 'gone' if moved else tmp_path) / name))
    hub.update_info('best_score', 0.5)
    runner = SimpleNamespace(work_dir=str(tmp_path), message_hub=hub, iter=3)
    runner.logger, runner.cfg = logging.getLogger('best'), dict(load_from=start)
    SafeCheckpointHook(interval=1, save_best=save_best, rule='greater').before_train(runner)
    found = {'best_ckpt': str(tmp_path / name), 'best_score': 0.5} if kept else {}
    assert {key: hub.runtime_info[key] for key in hub.runtime_info if 'best' in key} == found
    assert (tmp_path / 'best_acc_epoch_2.pth').exists()


def remove_best(checkpoint):
    for key in ('optimizer', 'param_schedulers'):
        del checkpoint[key]


BATCH, OPTIMIZER = 'train_dataloader.batch_size', 'optim_wrapper.optimizer.type'
NOT_WRITTEN = 'the training state of the checkpoint is not as mmengine writes it'
# What the run or the checkpoint has, and the message.
OTHER_RUNS = {
    f'{BATCH}=8': 'of iteration 12 in 2 epochs, but an epoch of this run has 12',
    'custom_hooks=[]': 'a run without EMAHook would resume',
    f'{OPTIMIZER}=SGD': 'holds the state of AdamW, but the run has SGD',
    'optim_wrapper.paramwise_cfg.norm_decay_mult=0.': 'optimizer of the checkpoint has groups of',
    'param_scheduler=None': 'holds the state of 2 schedules',
}
OTHER_CHECKPOINTS = {
    'the middle of an epoch': (
        lambda found: found['meta'].update(iter=14),
        'of iteration 14 in 2 epochs',
    ),
    'moments of another shape': (
        lambda found: found['optimizer']['state'][0].update(exp_avg=torch.zeros(7, 7)),
        'exp_avg of the optimizer .* shape',
    ),
    'the best weights': (remove_best, 'resumed from a checkpoint without optimizer'),
    'an epoch that is text': (
        lambda found: found['meta'].update(epoch='2'),
        'meta of the checkpoint must count',
    ),
    'a rate that is text': (
        lambda found: found['optimizer']['param_groups'][0].update(lr='1'),
        "lr of the optimizer in the checkpoint must be a number, got '1'",
    ),
    'a schedule of text': (
        lambda found: found['param_schedulers'][0].update(last_step='1'),
        "last_step of a schedule in the checkpoint must be a number, got '1'",
    ),
    'groups that are numbers': (
        lambda found: found['optimizer'].update(param_groups=[1]),
        NOT_WRITTEN,
    ),
    'a run that is a list': (lambda found: found['meta'].update(run=[]), NOT_WRITTEN),
    'gradients of another model': (
        lambda found: found.update(gradients=[{'w': torch.ones(1)}]),
        "no parameter for the gradient 'w'",
    ),
}
REFUSALS = {
    **{option: ([option], None, message) for option, message in OTHER_RUNS.items()},
    **{name: ([], *case) for name, case in OTHER_CHECKPOINTS.items()},
    'another number of processes': (
        [f'{BATCH}=32'],
        lambda found: found['meta']['run'].update(num_processes=2),
        r'with 1 processes; resume with the previous .* \(2 processes\)',
    ),
    'another optimizer of stock mmengine': (
        [f'{OPTIMIZER}=SGD'],
        lambda found: found['meta'].pop('run'),
        'holds the state of another optimizer, but the run has SGD',
    ),
}


@pytest.mark.parametrize('name', REFUSALS)
def test_a_run_that_would_go_on_otherwise_is_refused(name, train, stopped):
    options, edit, sentence = REFUSALS[name]
    if edit is not None:
        change(stopped / 'epoch_2.pth', edit)
    stops(sentence, train, stopped, *options, resume='epoch_2.pth')
    assert not (stopped / 'epoch_3.pth').exists()


def test_what_goes_on_otherwise_is_said(train, stopped):
    def two_processes(checkpoint):
        run = dict(num_processes=2, num_threads=64, backends='eager', batch_size=7, workers=True)
        checkpoint['meta']['run'].update(run)
        text = checkpoint['meta']['cfg']
        checkpoint['meta']['cfg'] = text.replace("type='AdamW'", "eps=0.5, type='AdamW'")
        checkpoint['state_dict']['head.fc.bias'][0] = torch.nan
        checkpoint.pop('ema_state_dict')

    change(stopped / 'epoch_2.pth', two_processes)
    stops('the loss of iteration 13 is nan', train, stopped, resume='epoch_2.pth')
    log = next(stopped.glob('*/*.log')).read_text()
    others = {'processes': '2', 'OMP_NUM_THREADS': '64', 'AFT_MM_BACKEND': "'eager'"}
    for name, value in (others | {'batch_size': '7', 'workers': 'True'}).items():
        assert f'was written with {name}={value} and the run resumes with {name}=' in log
    assert 'so this is ignored: optim_wrapper.optimizer.eps=its default (was 0.5); a new' in log
    assert 'no averaged weights: the average of EMAHook starts here' in log
    assert 'tensors of the checkpoint hold NaN or inf, the first is head.fc.bias' in log


def test_a_resume_removes_nothing_but_its_own(train, stopped, tmp_path_factory, whole_run):
    victim = tmp_path_factory.mktemp('victim')
    (victim / 'best_a.pth').write_text('precious')
    (stopped / 'epoch_7.pth').mkdir()
    (stopped / 'epoch_7.pth/precious').touch()

    def steer(checkpoint):
        info = checkpoint['message_hub']['runtime_info']
        info.update(
            best_ckpt=str(victim),
            best_score=-1.0,
            best_ckpt_a=str(victim / 'best_a.pth'),
            keep_ckpt_ids=[7, 1, 2],
            last_ckpt='/etc/passwd',
            cfg='raise SystemExit',
        )
        checkpoint['message_hub']['resumed_keys'].update(dict.fromkeys(info, True))

    change(stopped / 'epoch_2.pth', steer)
    log = train(stopped, 'default_hooks.checkpoint.max_keep_ckpts=2', resume='')
    assert (victim / 'best_a.pth').read_text() == 'precious'
    assert (stopped / 'epoch_7.pth/precious').exists()
    assert not (stopped / 'epoch_1.pth').exists()
    assert (
        f"best_ckpt of the checkpoint, '{victim}', is not a checkpoint in this run's folder" in log
    )
    assert_same_weights(stopped / 'epoch_3.pth', whole_run / 'epoch_3.pth')


def test_old_checkpoints_are_numbers(train, stopped):
    ids = ['../../victim']
    change(
        stopped / 'epoch_2.pth',
        lambda checkpoint: checkpoint['message_hub']['runtime_info'].update(keep_ckpt_ids=ids),
    )
    log = train(stopped, 'default_hooks.checkpoint.max_keep_ckpts=1', resume='')
    assert 'is not a list of epochs or iterations and is left alone' in log
    for ids in ([-1], 'abc', [True], [{}]):
        runner = SimpleNamespace(cfg={}, work_dir=stopped)
        found = SafeCheckpointHook()._foreign('keep_ckpt_ids', ids, stopped, runner)
        assert found == 'is not a list of epochs or iterations', ids


def test_checkpoints_of_stock_mmengine_resume_bit_by_bit(train, whole_run, tmp_path, root, config):
    train_whole(tmp_path, config, root, checkpoint=dict(type='CheckpointHook', interval=1))
    with pytest.raises(Exception, match='HistoryBuffer'):
        torch.load(tmp_path / 'epoch_2.pth', weights_only=True)
    (tmp_path / 'epoch_3.pth').unlink()
    train(tmp_path, resume='epoch_2.pth')
    assert_same_weights(tmp_path / 'epoch_3.pth', whole_run / 'epoch_3.pth')


@pytest.mark.parametrize('save_best', ['acc', ['acc', 'loss']])
def test_best_weights_are_removed_after_the_new_ones_are_written(save_best, tmp_path):
    several = not isinstance(save_best, str)
    rule = dict(rule=['greater', 'less'] if several else 'greater')
    hook = SafeCheckpointHook(save_best=save_best, interval=1, **rule)
    full = [False]

    def save_checkpoint(folder, filename, **kwargs):
        if full[0]:
            raise OSError('No space left on device')
        (tmp_path / filename).write_bytes(b'')

    hub = MessageHub.get_instance(f'best-{several}')
    runner = SimpleNamespace(
        work_dir=str(tmp_path),
        timestamp='now',
        message_hub=hub,
        logger=logging.getLogger('best'),
        save_checkpoint=save_checkpoint,
        epoch=0,
        iter=0,
    )
    hook.before_train(runner)

    def validate(epoch, acc, loss=1.0):
        runner.epoch = epoch
        hook._save_best_checkpoint(runner, dict(acc=acc, loss=loss))
        return sorted(path.name for path in tmp_path.glob('best_acc*'))

    assert validate(1, 0.5) == ['best_acc_epoch_1.pth']
    assert validate(2, 0.4) == ['best_acc_epoch_1.pth']
    assert validate(3, 0.6) == ['best_acc_epoch_3.pth']
    full[0] = True
    with pytest.raises(OSError, match='No space'):
        validate(4, 0.7)
    assert [path.name for path in tmp_path.glob('best_acc*')] == ['best_acc_epoch_3.pth']
