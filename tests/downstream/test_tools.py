"""Detectors and segmentors with the tools: resuming, testing, pictures, two processes."""

import json
import signal
from pathlib import Path
from typing import NamedTuple

import pytest

from ..all_configs import ROOT, configs_of
from ..helpers import nightly, only_error

CONFIGS = configs_of('detection', 'segmentation')


class Case(NamedTuple):
    config: str
    data: str
    length: str  # of the run
    interval: str  # of checkpoints
    killed: str  # the iteration, counted from 0
    checkpoints: tuple[str, str]  # the one to resume from, the last one
    metrics: set[str]
    draw: str
    pictures: str


CASES = [
    Case(
        'mask-rcnn-aft-conv-mini_1xb4-160e-person_coco-mini',
        'coco_mini',
        'train_cfg.max_epochs=2',
        'default_hooks.checkpoint.interval=1',
        '3',
        ('epoch_1.pth', 'epoch_2.pth'),
        {f'coco/{kind}_mAP{level}' for kind in ('bbox', 'segm') for level in ('', '_50', '_75')},
        'default_hooks.visualization.test_out_dir=pictures',
        'pictures/*.jpg',
    ),
    Case(
        'fcn-aft-conv-mini_1xb4-1200i_camvid',
        'camvid',
        'train_cfg.max_iters=4',
        'default_hooks.checkpoint.interval=2',
        '3',
        ('iter_2.pth', 'iter_4.pth'),
        {'mIoU', 'mAcc', 'aAcc'},
        'default_hooks.visualization.interval=1',
        'vis_data/vis_image/*.png',
    ),
]

pytestmark = pytest.mark.slow


@pytest.fixture
def call(run, pack, tmp_path):
    def call_tool(tool, case, *words, options=(), env=None, ranks=None):
        env = {'AFT_MM_DATA': str(pack(case.data).parent), **(env or {})}
        (tmp_path / 'config.py').write_text(
            f"_base_ = '{CONFIGS[case.config]}'\n"
            "custom_imports = dict(imports=['aft_mm.registry', 'recording_hooks'],\n"
            '                      allow_failed_imports=False)\n'
            "custom_hooks = [dict(type='RecordLossHook'), dict(type='KillHook')]\n"
        )
        options = [
            *options,
            case.length,
            case.interval,
            'param_scheduler=None',
            'train_dataloader.batch_size=2',
            *(
                f'{split}_dataloader.{option}'
                for split, number in dict(train=4, val=3, test=3).items()
                for option in ('num_workers=0', f'dataset.indices={number}')
            ),
        ]
        command = [ROOT / 'tools' / tool, 'config.py', *words, '--cfg-options', *options]
        return run(*command, cwd=tmp_path, env=env, ranks=ranks)

    return call_tool


@pytest.mark.nightly
@pytest.mark.parametrize('case', CASES, ids=lambda case: case.config)
def test_train_kill_resume_test_and_plot(call, tmp_path, case):
    words = ('train.py', case, '--work-dir', 'work')
    assert call(*words, env={'KILL_AFTER': case.killed}).returncode == -signal.SIGKILL
    assert Path((tmp_path / 'work/last_checkpoint').read_text()).name == case.checkpoints[0]
    resumed = call(*words, '--resume')
    assert resumed.returncode == 0, resumed.stderr
    assert Path((tmp_path / 'work/last_checkpoint').read_text()).name == case.checkpoints[1]
    losses = list(map(json.loads, (tmp_path / 'work/loss_0.jsonl').read_text().splitlines()))
    # Iterations 2 and 3 ran twice.
    assert [i for i, _ in losses] == [0, 1, 2, 3, 2, 3] and all(0 < x < 50 for _, x in losses)

    words = f'work/{case.checkpoints[1]} --work-dir test --out metrics.json'.split()
    options = ['default_hooks.visualization.draw=True', case.draw]
    tested = call('test.py', case, *words, options=options)
    assert tested.returncode == 0, tested.stderr
    assert case.metrics <= json.loads((tmp_path / 'metrics.json').read_text()).keys()
    assert len(list(tmp_path.glob(f'test/*/{case.pictures}'))) == 3


@pytest.mark.nightly
def test_two_processes_on_a_cpu(call, tmp_path):
    case = CASES[0]._replace(
        config='retinanet-aft-conv-mini_1xb4-24e_bccd-voc',
        data='bccd',
        length='train_cfg.max_epochs=1',
    )
    result = call('train.py', case, '--work-dir', 'work', '--launcher', 'pytorch', ranks=2)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / 'work/epoch_1.pth').exists()
    assert 'pascal_voc/mAP' in result.stdout + result.stderr
    # Four images: each process saw its own two.
    first, second = ((tmp_path / f'work/loss_{rank}.jsonl').read_text() for rank in (0, 1))
    assert len(first.splitlines()) == len(second.splitlines()) == 1 and first != second


@pytest.mark.parametrize(
    ('case', 'option', 'message'),
    [
        (CASES[0], 'neck.in_channels=192', 'neck.in_channels must be 96, the width of the backb'),
        (CASES[1], 'decode_head.in_channels=48', 'decode_head.in_channels must be 96, the width'),
        *nightly(
            [
                (CASES[1], 'backbone.out_indices=[1,5]', 'out_indices must be one or more ints, '),
                (CASES[1], 'decode_head.in_index=2', 'decode_head.in_index must be below 2, the n'),
            ]
        ),
    ],
)
def test_mismatched_parts_give_a_one_line_message(run, pack, tmp_path, case, option, message):
    words = CONFIGS[case.config], '--cfg-options', f'model.{option}'
    env = {'AFT_MM_DATA': str(pack(case.data).parent)}
    result = run(ROOT / 'tools/train.py', *words, cwd=tmp_path, env=env)
    assert message in only_error(result)


def test_detectors_and_segmentors_are_counted(run, tmp_path):
    names = ('retinanet-aft-conv-mini_1xb4-24e_bccd', 'fcn-aft-conv-mini_1xb4-1200i_camvid')
    words = ('--shape', '64', '48', '--json', 'counts.json')
    tool = ROOT / 'tools/analysis_tools/model_complexity.py'
    result = run(tool, *(CONFIGS[name] for name in names), *words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    counts = json.loads((tmp_path / 'counts.json').read_text())
    assert [row['shape'] for row in counts] == [[3, 64, 48]] * 2
    assert not any(row['uncounted'] for row in counts)
    assert [round(row['parameters'] / 1e6, 2) for row in counts] == [1.27, 1.02]


@pytest.mark.parametrize(
    ('config', 'place'),
    [
        ('retinanet-aft-conv-tiny_8xb2-1x_coco', 'nowhere/coco/'),
        *nightly(
            [
                ('retinanet-aft-conv-tiny_8xb2-1x_voc0712', 'nowhere/VOCdevkit/'),
                ('fcn-aft-conv-tiny_8xb2-160k_ade20k-512px', 'nowhere/ade/ADEChallengeData2016'),
            ]
        ),
    ],
)
def test_missing_data_gives_a_one_line_message(tool, tmp_path, config, place, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('AFT_MM_DATA', 'nowhere')
    with pytest.raises(SystemExit) as end:
        tool('train').main([str(CONFIGS[config])])
    message = str(end.value)
    assert message.startswith('Error: ') and '\n' not in message
    assert f"reads '{place}', which does not exist" in message and 'AFT_MM_DATA' in message
