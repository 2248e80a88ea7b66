"""--tta and --show-dir of `aft_mm test`, and results without a detection, for boxes and masks."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from PIL import Image
from torch import nn

from aft_mm.apis.loading import build_model
from aft_mm.cli.main import main

from ..errors import stops
from ..helpers import nightly, save_picture

RNG = np.random.default_rng(0)
SIZE = (96, 64)


def boxes(root, mirrored):
    rng = np.random.default_rng(0)
    for part in ('train', 'val'):
        images, found = [], []
        for number in range(3):
            pixels = rng.integers(0, 256, (SIZE[1], SIZE[0], 3))
            save_picture(root / f'{part}{number}.png', pixels[:, ::-1] if mirrored else pixels)
            images.append(
                dict(id=number, file_name=f'{part}{number}.png', width=SIZE[0], height=SIZE[1])
            )
            box = dict(bbox=[47 if mirrored else 8, 4, 41, 39], area=41 * 39, iscrowd=0)
            found.append(dict(box, id=number + 1, image_id=number, category_id=1 + number % 2))
        names = [dict(id=1, name='cat'), dict(id=2, name='dog')]
        content = dict(images=images, annotations=found, categories=names)
        (root / f'{part}.json').write_text(json.dumps(content))


def masks(root, mirrored):
    rng = np.random.default_rng(0)
    for part in ('train', 'val'):
        for number in range(3):
            pixels = rng.integers(0, 256, (SIZE[1], SIZE[0], 3))
            labels = rng.integers(0, 3, SIZE[::-1])
            turned = slice(None, None, -1) if mirrored else slice(None)
            save_picture(root / f'{part}/{number}.png', pixels[:, turned])
            save_picture(root / f'{part}_masks/{number}.png', labels[:, turned])


@pytest.fixture
def run(tool, here):
    def test(kind, *words, mirrored=False, options=()):
        name = f'{kind}{"_mirrored" * mirrored}'
        if not Path(f'{name}.py').exists():
            (boxes if kind == 'coco' else masks)(here / name, mirrored)
            main(['new', kind, name, '--out', f'{name}.py'])
            cfg = Config.fromfile(f'{name}.py')
            torch.manual_seed(0)
            model = build_model(cfg)
            for key, parameter in model.named_parameters():
                nn.init.normal_(parameter, std=0.03 if 'bbox_head' in key else 0.2)
            torch.save(dict(state_dict=model.state_dict(), meta={}), f'{name}.pth')
        dump = f'{name}{len(words)}.pkl'
        changes = [
            f'visualizer.name={here.name}-{dump}',
            f'experiment_name={here.name}-{dump}',
            'test_dataloader.num_workers=0',
            *options,
        ]
        command = [f'{name}.py', f'{name}.pth', '--dump', dump, *words]
        tool('test').main([*command, '--cfg-options', *changes])
        return pickle.loads(Path(dump).read_bytes())

    return test


def test_averaged_masks_of_a_mirrored_image_are_mirrored(run):
    plain, ours, theirs = (
        [
            sample['pred_sem_seg']['data'].squeeze()
            for sample in run('masks', *words, mirrored=mirrored)
        ]
        for words, mirrored in (([], False), (['--tta'], False), (['--tta'], True))
    )
    same = np.mean(
        [(one == other.flip(-1)).float().mean() for one, other in zip(ours, theirs, strict=True)]
    )
    assert same > 0.999
    assert any(not torch.equal(one, other) for one, other in zip(plain, ours, strict=True))


def test_averaged_boxes_of_a_mirrored_image_are_mirrored(run):
    options = ['model.test_cfg.score_thr=0.0', 'model.test_cfg.max_per_img=20']
    plain, ours, theirs = (
        [
            sample['pred_instances']
            for sample in run('coco', *words, mirrored=mirrored, options=options)
        ]
        for words, mirrored in (([], False), (['--tta'], False), (['--tta'], True))
    )
    for one, other, alone in zip(ours, theirs, plain, strict=True):
        assert len(one['scores']) > 5 and not torch.equal(one['scores'][:5], alone['scores'][:5])
        torch.testing.assert_close(one['scores'][:5], other['scores'][:5], rtol=1e-4, atol=1e-5)
        left, top, right, bottom = other['bboxes'][:5].unbind(-1)
        turned = torch.stack([SIZE[0] - right, top, SIZE[0] - left, bottom], -1)
        torch.testing.assert_close(one['bboxes'][:5], turned, rtol=1e-3, atol=0.05)


@pytest.mark.parametrize('kind', nightly(['coco', 'masks'], ['coco']))
def test_a_picture_of_each_image_is_written(kind, run, capsys):
    run(kind, '--show-dir', 'pictures')
    assert 'pictures   3 of 3 images in pictures\n' in capsys.readouterr().out
    pictures = [*Path('pictures').iterdir()]
    assert len(pictures) == 3
    # mmdet shows the annotations next to the predictions.
    sizes = {Image.open(path).size for path in pictures}
    assert sizes <= {SIZE, (2 * SIZE[0], SIZE[1])}


def test_nothing_detected_is_an_average_precision_of_0(run, capfd):
    run('coco', '--out', 'none.json', options=['model.test_cfg.score_thr=1.0'])
    shown = capfd.readouterr().out
    assert 'ERROR' not in shown and 'results of the whole dataset' not in shown
    assert 'boxes      none is detected, so AP is 0' in shown
    metrics = json.load(open('none.json'))
    assert (
        metrics['coco/bbox_mAP'] == metrics['coco/bbox_mAP_50'] == metrics['coco/bbox_mAP_m'] == 0
    )
    assert metrics['coco/bbox_mAP_l'] == -1  # no object of that size


def test_masks_of_instances_are_not_averaged(run, config, tmp_path):
    cfg = Config.fromfile(config('tiny_instances'), import_custom_modules=False)
    cfg.custom_imports.imports = ['aft_mm.registry']
    run('coco')
    base = Config.fromfile('coco.py')
    for key in ('test_dataloader', 'test_evaluator', 'val_dataloader', 'val_evaluator'):
        cfg[key] = base[key]
    for key in ('default_hooks', 'custom_hooks'):
        cfg.pop(key, None)
    cfg.dump('instances.py')
    torch.save(dict(state_dict=build_model(cfg).state_dict(), meta={}), 'instances.pth')
    words = ['test', 'instances.py', 'instances.pth', '--tta', '--work-dir', 'work']
    stops("--tta is for boxes only, as mmdet averages no masks, got 'instances.py'", main, words)
