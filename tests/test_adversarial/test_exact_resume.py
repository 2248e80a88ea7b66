"""Runs of six tasks that stop at random moments and resume to the bits of one that did not."""

import functools
import importlib.util
import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ..speech_data import write_sound
from ..test_integration import assert_same, write_data

pytestmark = [pytest.mark.adversarial, pytest.mark.slow]

STOPS = ('SIGTERM', 'SIGTERM group', 'SIGINT', 'SIGINT group', 'SIGHUP', 'SIGKILL', 'disk')
EXTRA = {
    'speech': ('soundfile', 'torchaudio', 'jiwer'),
    'detection': ('mmdet',),
    'instances': ('mmdet',),
    'segmentation': ('mmseg',),
}
# Moments of each task; EXACT_RESUME_MOMENTS=20 gives 120 in all.
NUM_MOMENTS = int(os.environ.get('EXACT_RESUME_MOMENTS', 4))
# Config and options of a task; all train for 18 iterations or a few more.
PERIODIC = 'default_hooks.minutes.type=aft_mm.PeriodicCheckpointHook'
STOPPED = 'default_hooks.stop.type=StopHere'
TASKS = {
    # Mixup, crops, drop path, averaged weights, one worker.
    'classification': (
        'tiny',
        [PERIODIC, STOPPED, 'model.train_cfg.augments.type=Mixup']
        + ['model.train_cfg.augments.alpha=0.2'],
    ),
    # Random crops of text, dropout, averaged weights, autocast, accumulation over 4 of 6.
    'text': (
        'tiny_text',
        [PERIODIC, STOPPED, 'optim_wrapper.accumulative_counts=4', '--amp']
        + ['train_dataloader.num_workers=2'],
    ),
    # SpecAugment, dropout, a schedule that depends on the validation, no workers.
    'speech': ('tiny_speech', [PERIODIC, STOPPED]),
    'detection': ('tiny_detection', []),  # RetinaNet
    'instances': ('tiny_instances', []),  # Mask R-CNN
    'segmentation': ('tiny_segmentation', []),  # UPerNet with an auxiliary FCN head
}


def write_frames(folder):
    """Frames of random pixels in the layouts of CamVid and BCCD."""
    rng = np.random.default_rng(0)

    def save(path, array):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(array.astype(np.uint8)).save(path)

    for split, count in (('train', 6), ('val', 2)):
        for number in range(count):
            camvid = folder / 'data/camvid'
            save(camvid / f'{split}/{number}.jpg', rng.integers(0, 256, (40, 48, 3)))
            save(camvid / f'{split}annot/{number}.png', rng.integers(0, 12, (40, 48)))
    boxes = folder / 'data/bccd'
    for number in range(12):
        save(boxes / f'JPEGImages/{number}.png', rng.integers(0, 256, (48, 64, 3)))
    images = [dict(id=i, file_name=f'{i}.png', width=64, height=48) for i in range(12)]
    mark = dict(bbox=[8, 4, 31, 29], area=899, iscrowd=0)
    mark |= dict(segmentation=[[8, 4, 39, 4, 39, 33, 8, 33]])
    marks = [dict(mark, id=i, image_id=i, category_id=i % 3 + 1) for i in range(12)]
    names = [dict(id=i + 1, name=name) for i, name in enumerate(('RBC', 'WBC', 'Platelets'))]
    (boxes / 'annotations_coco').mkdir(parents=True)
    for split, part in (('train', slice(None)), ('val', slice(2))):
        content = dict(images=images[part], annotations=marks[part], categories=names)
        path = boxes / f'annotations_coco/instances_{split}.json'
        path.write_text(json.dumps(content))


@pytest.fixture(scope='module')
def train(run, root, config, tmp_path_factory):
    """Train a task in a new folder, or again in the same one."""

    def call(task, *words, folder=None, **env):
        name, options = TASKS[task]
        if folder is None:
            folder = tmp_path_factory.mktemp(task)
            write_data(folder)
            write_frames(folder)
            if task == 'speech':
                write_sound(folder)
        flags = [option for option in options if option.startswith('--')]
        changes = [option for option in options if not option.startswith('--')]
        result = run(
            root / 'tools/train.py',
            config(name),
            '--work-dir',
            'work',
            *flags,
            *words,
            *(['--cfg-options', *changes] if changes else []),
            cwd=folder,
            env=dict(env, AFT_MM_DATA='data'),
        )
        return folder, result

    return call


@pytest.fixture(scope='module')
def uninterrupted(train):
    """Folder of a run by its task."""

    @functools.cache
    def call(task):
        for module in EXTRA.get(task, ()):
            importlib.import_module(module)  # once, instead of in every fork
        folder, result = train(task, CHECKPOINTS='4')
        assert result.returncode == 0, result.stderr
        return folder

    return call


def final_state(folder):
    """The final checkpoint without what depends on the clock, and the last metrics."""
    path = Path(folder, 'work/last_checkpoint').read_text()
    checkpoint = torch.load(path, map_location='cpu', weights_only=True)
    scalars = checkpoint['message_hub']['log_scalars']
    state = {
        'scalars': {
            key: value
            for key, value in scalars.items()
            if not key.endswith(('time', 'memory', 'eta')) and not key.startswith('val/')
        },
        **{
            key: checkpoint[key]
            for key in ('state_dict', 'ema_state_dict', 'optimizer', 'param_schedulers')
            if key in checkpoint
        },
    }
    return state, metrics(folder)


def metrics(folder):
    """The numbers of the last validation."""
    for path in sorted(folder.glob('work/*/vis_data/scalars.json'), reverse=True):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        found = [record for record in records if 'loss' not in record and 'step' in record]
        found = [record for record in found if 'seconds_per_epoch' not in record]
        if found:
            return {key: value for key, value in found[-1].items() if not key.endswith('time')}
    raise AssertionError(f'{folder} has no metrics')


def moments(task):
    """Return ``NUM_MOMENTS`` pairs of an iteration and a way to stop, the same in every run."""
    rng = random.Random(task)
    ways = rng.sample(STOPS, len(STOPS))
    return [(rng.randint(1, 17), ways[i % len(ways)]) for i in range(NUM_MOMENTS)]


CASES = [(task, *moment) for task in TASKS for moment in moments(task)]


@pytest.mark.parametrize(('task', 'after', 'by'), CASES)
def test_a_run_that_stops_resumes_to_the_same_bits(task, after, by, train, uninterrupted):
    for module in EXTRA.get(task, ()):
        if not importlib.util.find_spec(module):
            pytest.skip(f'{task} needs {module}')
    whole = uninterrupted(task)
    folder, stopped = train(task, STOP_AFTER=str(after), STOP_BY=by, CHECKPOINTS='4')
    name = by.split()[0]
    if by == 'disk':
        assert stopped.returncode == 1, stopped.stderr
        assert 'File too large' in stopped.stderr.splitlines()[-1]
    elif name == 'SIGKILL':
        assert stopped.returncode == -signal.SIGKILL
    else:
        assert stopped.returncode == 128 + getattr(signal, name), stopped.stderr
        (line,) = [line for line in stopped.stderr.splitlines() if 'stopped the run' in line]
        assert (
            f'{name} stopped the run after iteration' in line and 'Traceback' not in stopped.stderr
        )
    for hidden in (folder / 'work').glob('.*.part'):
        assert by == 'SIGKILL', hidden
    # Before the first checkpoint only `auto` starts again.
    _, resumed = train(task, '--resume', 'auto', folder=folder, CHECKPOINTS='4')
    assert resumed.returncode == 0, resumed.stderr
    assert 'random state' not in resumed.stderr
    state, numbers = final_state(folder)
    expected, expected_numbers = final_state(whole)
    assert_same(state, expected)
    assert numbers == expected_numbers


def test_two_processes_resume_to_the_same_bits(run, root, config, tmp_path):
    """Their random numbers are in no checkpoint, as only the first process writes one."""
    command = ['bash', root / 'tools/dist_train.sh', config('tiny'), 2, '--work-dir']
    options = ['--cfg-options', STOPPED, 'train_dataloader.batch_size=8']
    whole = run(*command, 'whole', *options, cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    stop = dict(STOP_AFTER='9', STOP_BY='SIGTERM')
    stopped = run(*command, 'stopped', *options, cwd=tmp_path, env=stop)
    assert 'SIGTERM stopped the run after iteration 9' in stopped.stderr
    resumed = run(*command, 'stopped', '--resume', *options, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    one, other = (
        torch.load(tmp_path / name / 'epoch_3.pth', weights_only=True)
        for name in ('whole', 'stopped')
    )
    for part in ('state_dict', 'ema_state_dict', 'optimizer'):
        assert_same(one[part], other[part])
