"""Runs that stop at random moments and resume are bit-identical to uninterrupted ones."""

import functools
import importlib
import importlib.util
import json
import os
import random
import re
import signal
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import mmengine.config.utils
import numpy as np
import pytest
import torch
from mmengine.config import Config

from ..helpers import save_picture
from ..parallel_data import write_pairs
from ..speech_data import write_sound
from ..test_integration import assert_same, write_data

pytestmark = [pytest.mark.adversarial, pytest.mark.slow]

STOPS = ('SIGTERM', 'SIGKILL', 'disk', 'SIGINT group', 'SIGHUP', 'SIGTERM group', 'SIGINT')
# Of each task, at most four per run; EXACT_RESUME_MOMENTS=20 gives 140 in all. The last three of the
# first runs have each way three times, and a validation in every task.
NUM_MOMENTS = int(os.environ.get('EXACT_RESUME_MOMENTS', 3))
IMPORTED = [
    *(
        'aft_mm.registry',
        'aft_mm.cli.commands.train',
        'aft_mm.models',
        'sklearn.datasets',
        'torch._dynamo',
    ),
    *('jiwer', 'sacrebleu', 'sentencepiece', 'torch.utils.tensorboard'),
    *(
        f'{package}.{part}'
        for package in ('mmpretrain', 'mmdet', 'mmseg')
        for part in ('datasets', 'engine', 'evaluation', 'models', 'visualization')
    ),
]
BEST = 'default_hooks.checkpoint.save_best'
PERIODIC = 'default_hooks.minutes.type=aft_mm.PeriodicCheckpointHook'


class Task(NamedTuple):
    """A config of three epochs of ``length`` iterations, with a step after each ``per_step``."""

    config: str
    options: tuple[str, ...]
    length: int = 6
    per_step: int = 1
    needs: tuple[str, ...] = ()


TASKS = {
    # Repeated augmentation, Mixup, crops, drop path, averaged weights, one worker.
    'classification': Task(
        'tiny',
        (
            PERIODIC,
            'train_dataloader.sampler.type=RepeatAugSampler',
            'model.train_cfg.augments.type=Mixup',
            'model.train_cfg.augments.alpha=0.2',
        ),
    ),
    # Random crops of text, dropout, averaged weights, autocast, accumulation, two workers.
    'text': Task(
        'tiny_text',
        ('--amp', 'optim_wrapper.accumulative_counts=4', 'train_dataloader.num_workers=2'),
        per_step=4,
    ),
    # Batches by number of tokens, dropout, one worker, which is not restarted.
    'translation': Task(
        'tiny_translation',
        (
            'train_cfg.val_interval=1',
            f'{BEST}=bits_per_subword',
            'default_hooks.checkpoint.rule=less',
            'train_dataloader.num_workers=1',
            'train_dataloader.persistent_workers=True',
        ),
        length=8,
        needs=('sentencepiece', 'sacrebleu'),
    ),
    # SpecAugment, dropout, batches by length, a schedule that depends on the validation.
    'speech': Task(
        'tiny_speech',
        (PERIODIC, f'{BEST}=character_error_rate', 'default_hooks.checkpoint.rule=less'),
        length=8,
        needs=('soundfile', 'jiwer'),
    ),
    # Resizing, flips, drop path, one worker, which is not restarted: RetinaNet and Mask R-CNN.
    'detection': Task('tiny_detection', (), needs=('mmdet',)),
    'instances': Task('tiny_instances', (), needs=('mmdet',)),
    # Iterations instead of epochs; crops, flips, drop path, one worker: UPerNet.
    'segmentation': Task('tiny_segmentation', (), needs=('mmseg',)),
}


def write_frames(folder):
    rng = np.random.default_rng(0)

    for split, count in (('train', 6), ('val', 2)):
        for number in range(count):
            camvid = folder / 'data/camvid'
            save_picture(camvid / f'{split}/{number}.jpg', rng.integers(0, 256, (40, 48, 3)))
            save_picture(camvid / f'{split}annot/{number}.png', rng.integers(0, 12, (40, 48)))
    boxes = folder / 'data/bccd'
    for number in range(12):
        save_picture(boxes / f'JPEGImages/{number}.png', rng.integers(0, 256, (48, 64, 3)))
    images = [dict(id=i, file_name=f'{i}.png', width=64, height=48) for i in range(12)]
    mark = dict(bbox=[8, 4, 31, 29], area=899, iscrowd=0)
    mark |= dict(segmentation=[[8, 4, 39, 4, 39, 33, 8, 33]])
    marks = [dict(mark, id=i + 1, image_id=i, category_id=i % 3 + 1) for i in range(12)]
    names = [dict(id=i + 1, name=name) for i, name in enumerate(('RBC', 'WBC', 'Platelets'))]
    (boxes / 'annotations_coco').mkdir(parents=True)
    for split, part in (('train', slice(None)), ('val', slice(2))):
        content = dict(images=images[part], annotations=marks[part], categories=names)
        path = boxes / f'annotations_coco/instances_{split}.json'
        path.write_text(json.dumps(content))


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp('data')
    write_data(folder)
    write_frames(folder)
    if not missing(TASKS['speech']):
        write_sound(folder)
    if not missing(TASKS['translation']):
        write_pairs(folder)
    return folder


@pytest.fixture(scope='module')
def train(run, root, config, data):
    def call(name, work_dir, *words, **env):
        task = TASKS[name]
        flags = [option for option in task.options if option.startswith('--')]
        changes = [option for option in task.options if not option.startswith('--')]
        return run(
            root / 'tools/train.py',
            config(task.config),
            '--work-dir',
            work_dir,
            *flags,
            *words,
            '--cfg-options',
            'default_hooks.stop.type=StopHere',
            *changes,
            cwd=data,
            env=dict(env, AFT_MM_DATA='data', CHECKPOINTS='4'),
        )

    return call


@pytest.fixture(scope='module', autouse=True)
def short_runs(config):
    """Do once what all runs share: imports, lists of configs, reports and plots."""
    for module in IMPORTED:
        if importlib.util.find_spec(module.partition('.')[0]):
            importlib.import_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('mmengine.runner.runner.collect_env', dict)
        patch.setattr(Config, 'pretty_text', '')
        patch.setattr('aft_mm.cli.commands.train.plot', lambda *words, out: out)
        # The index of configs of mmdet and mmseg: a second in every run.
        read = functools.cache(mmengine.config.utils._get_cfg_metainfo)
        patch.setattr(mmengine.config.utils, '_get_cfg_metainfo', read)
        for task in TASKS.values():
            if not missing(task):
                Config.fromfile(config(task.config), import_custom_modules=False)
        yield


def missing(task):
    return [module for module in task.needs if not importlib.util.find_spec(module)]


@pytest.fixture(scope='module')
def uninterrupted(train, data):
    @functools.cache
    def call(name):
        result = train(name, name)
        assert result.returncode == 0, result.stderr
        return final_state(data / name)

    return call


def final_state(folder):
    """The final checkpoint without what depends on the clock, all metrics and the best weights."""
    path = folder.parent / Path(folder, 'last_checkpoint').read_text()
    checkpoint = torch.load(path, map_location='cpu', weights_only=True)
    scalars = checkpoint['message_hub']['log_scalars']
    return {
        'scalars': {
            key: value
            for key, value in scalars.items()
            if not key.endswith(('time', 'memory', 'eta'))
        },
        'random_state': checkpoint['meta'].get('random_state'),
        **{
            key: checkpoint[key]
            for key in ('state_dict', 'ema_state_dict', 'optimizer', 'param_schedulers')
            if key in checkpoint
        },
        'best': {
            path.name: torch.load(path, weights_only=True)['state_dict']
            for path in sorted(folder.glob('best_*.pth'))
        },
        'metrics': metrics(folder),
    }


def metrics(folder):
    found = {}
    for path in sorted(folder.glob('*/vis_data/scalars.json')):
        for record in map(json.loads, path.read_text().splitlines()):
            if 'loss' not in record and 'seconds_per_epoch' not in record:
                found[record['step']] = {
                    key: value for key, value in record.items() if not key.endswith('time')
                }
    assert found, f'{folder} has no metrics'
    return found


def moments(name, number):
    """Return four moments in order, the same in every run, and how the run is stopped there.

    Moment 7 is after iteration 7, and 6.5 in the validation that follows iteration 6.
    """
    rng, task = random.Random(f'{name} {number}'), TASKS[name]
    last = (3 * task.length - 1) // task.per_step * task.per_step
    first = 4 * ([*TASKS].index(name) + number)  # five runs of a task are stopped in every way
    while True:
        iterations = rng.sample(range(1, last + 1), 3)
        points = sorted([*iterations, task.length * rng.randint(1, 3) + 0.5])
        # A signal waits for the step of accumulated gradients.
        ends = [-(-int(point) // task.per_step) * task.per_step for point in points]
        if not all(end < after for end, (_, after) in zip(ends, pairwise(points), strict=False)):
            continue
        ways = [STOPS[(first + index) % len(STOPS)] for index in range(4)]
        if points[3] < 3 * task.length or ways[3] != 'disk':  # nothing is written later
            return list(zip(points, ways, strict=True))


CASES = [
    pytest.param(
        name,
        number,
        id=f'{name}-{number}',
        marks=[pytest.mark.nightly] * (name != 'classification' and number == 0),
    )
    for number in range(-(-NUM_MOMENTS // 4))
    for name in TASKS
]


@pytest.mark.parametrize(('name', 'number'), CASES)
def test_a_run_that_stops_resumes_to_the_same_bits(name, number, train, uninterrupted, data):
    if missing(TASKS[name]):
        pytest.skip(f'{name} needs {" and ".join(missing(TASKS[name]))}')
    expected, work_dir, resume = uninterrupted(name), f'{name}-{number}', []
    for moment, way in moments(name, number)[-NUM_MOMENTS:]:
        print(f'{way} at {moment}')
        stopped = train(name, work_dir, *resume, STOP_AFTER=str(moment), STOP_BY=way)
        assert_stopped(stopped, moment, way)
        if way != 'SIGKILL':
            assert not list((data / work_dir).glob('.*.part'))
        resume = ['--resume', 'auto']  # before the first checkpoint only `auto` starts again
    result = train(name, work_dir, *resume)
    assert result.returncode == 0, result.stderr
    assert 'random state' not in result.stderr
    assert_same(final_state(data / work_dir), expected)


def assert_stopped(result, moment, way):
    signal_name = way.split()[0]
    if way == 'disk':
        assert result.returncode == 1, result.stderr
        assert 'File too large' in result.stderr.splitlines()[-1]
    elif way == 'SIGKILL':
        assert result.returncode == -signal.SIGKILL, result.stderr
    else:
        assert result.returncode == 128 + getattr(signal, signal_name), result.stderr
        (line,) = [line for line in result.stderr.splitlines() if 'stopped the run' in line]
        place = ' after iteration' if moment == int(moment) else ''
        assert re.search(f'{signal_name} stopped the run{place}', line)
        assert 'Traceback' not in result.stderr


@pytest.mark.nightly
def test_three_processes_resume_to_the_same_bits(run, root, config, tmp_path):
    """Only the first one writes checkpoints; that of the first epoch waits for a step."""

    def train(folder, *words, **env):
        return run(
            root / 'tools/train.py',
            config('tiny'),
            '--launcher=pytorch',
            f'--work-dir={folder}',
            *words,
            '--cfg-options',
            'default_hooks.stop.type=StopHere',
            'train_dataloader.batch_size=5',
            'optim_wrapper.accumulative_counts=4',
            cwd=tmp_path,
            env=env,
            ranks=3,
        )

    whole = train('whole')
    assert whole.returncode == 0, whole.stderr
    killed = train('stopped', STOP_AFTER='9', STOP_BY='SIGKILL')
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert Path(tmp_path, 'stopped/last_checkpoint').read_text().endswith('epoch_1.pth')
    stopped = train('stopped', '--resume', STOP_AFTER='14', STOP_BY='SIGTERM')
    assert 'SIGTERM stopped the run after iteration 16' in stopped.stderr, stopped.stderr
    resumed = train('stopped', '--resume')
    assert resumed.returncode == 0, resumed.stderr
    assert_same(final_state(tmp_path / 'stopped'), final_state(tmp_path / 'whole'))
    assert 'rounded differently' not in resumed.stdout + resumed.stderr
