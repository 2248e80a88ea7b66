"""Detectors and segmentors with the tools: pictures, two processes, wrong parts, counts, missing data."""

import json

import pytest

from ..all_configs import ROOT, configs_of
from ..errors import stops
from ..helpers import nightly, only_error

CONFIGS = configs_of('detection', 'segmentation')
MASK_RCNN = 'mask-rcnn-aft-conv-mini_1xb4-160e-person_coco-mini'
FCN = 'fcn-aft-conv-mini_1xb4-1200i_camvid'
DATA = {MASK_RCNN: 'coco_mini', FCN: 'camvid'}

pytestmark = pytest.mark.slow


@pytest.fixture
def call(run, pack, tmp_path):
    def call_tool(tool, name, data, *words, options=(), ranks=None):
        (tmp_path / 'config.py').write_text(
            f"_base_ = '{CONFIGS[name]}'\n"
            "custom_imports = dict(imports=['aft_mm.registry', 'recording_hooks'],\n"
            '                      allow_failed_imports=False)\n'
            "custom_hooks = [dict(type='RecordLossHook')]\n"
        )
        options = [*options, 'param_scheduler=None', 'train_dataloader.batch_size=2']
        for split, number in dict(train=4, val=3, test=3).items():
            options += [f'{split}_dataloader.num_workers=0']
            options += [f'{split}_dataloader.dataset.indices={number}']
        command = ROOT / 'tools' / tool, 'config.py', *words, '--cfg-options', *options
        env = {'AFT_MM_DATA': str(pack(data).parent)}
        result = run(*command, cwd=tmp_path, env=env, ranks=ranks)
        assert result.returncode == 0, result.stderr
        return result

    return call_tool


@pytest.mark.nightly
@pytest.mark.parametrize(
    'name, length, metrics, draw, pictures',
    [
        (
            MASK_RCNN,
            'train_cfg.max_epochs=1',
            {
                f'coco/{kind}_mAP{level}'
                for kind in ('bbox', 'segm')
                for level in ('', '_50', '_75')
            },
            'test_out_dir=pictures',
            'pictures/*.jpg',
        ),
        (
            FCN,
            'train_cfg.max_iters=2',
            {'mIoU', 'mAcc', 'aAcc'},
            'interval=1',
            'vis_data/vis_image/*.png',
        ),
    ],
)
def test_the_tools_train_test_and_draw(call, tmp_path, name, length, metrics, draw, pictures):
    call('train.py', name, DATA[name], '--work-dir', 'work', options=[length])
    checkpoint = (tmp_path / 'work/last_checkpoint').read_text()
    words = checkpoint, '--work-dir', 'test', '--out', 'metrics.json'
    options = [f'default_hooks.visualization.{option}' for option in ('draw=True', draw)]
    call('test.py', name, DATA[name], *words, options=options)
    assert metrics <= json.loads((tmp_path / 'metrics.json').read_text()).keys()
    assert len(list(tmp_path.glob(f'test/*/{pictures}'))) == 3


@pytest.mark.nightly
def test_two_processes_on_a_cpu(call, tmp_path):
    name = 'retinanet-aft-conv-mini_1xb4-24e_bccd-voc'
    words = '--work-dir', 'work', '--launcher', 'pytorch'
    result = call('train.py', name, 'bccd', *words, options=['train_cfg.max_epochs=1'], ranks=2)
    assert (tmp_path / 'work/epoch_1.pth').exists()
    assert 'pascal_voc/mAP' in result.stdout + result.stderr
    # Four images: each process saw its own two.
    first, second = ((tmp_path / f'work/loss_{rank}.jsonl').read_text() for rank in (0, 1))
    assert len(first.splitlines()) == len(second.splitlines()) == 1 and first != second


MISMATCHED = [
    (MASK_RCNN, 'neck.in_channels=192', 'neck.in_channels must be 96, the width of the backb'),
    (FCN, 'decode_head.in_channels=48', 'decode_head.in_channels must be 96, the width'),
    (FCN, 'backbone.out_indices=[1,5]', 'out_indices must be one or more ints, '),
    (FCN, 'decode_head.in_index=2', 'decode_head.in_index must be below 2, the number'),
]


@pytest.mark.parametrize('name, option, message', nightly(MISMATCHED, MISMATCHED[2:]))
def test_mismatched_parts_give_a_one_line_message(run, pack, tmp_path, name, option, message):
    words = CONFIGS[name], '--cfg-options', f'model.{option}'
    env = {'AFT_MM_DATA': str(pack(DATA[name]).parent)}
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
def test_missing_data_gives_a_one_line_message(tool, here, config, place, monkeypatch):
    monkeypatch.setenv('AFT_MM_DATA', 'nowhere')
    message = f"reads '{place}', which does not exist.*AFT_MM_DATA"
    stops(message, tool('train').main, [str(CONFIGS[config])])
