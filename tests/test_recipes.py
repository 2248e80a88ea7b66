"""The recipes of the papers: optimizers, DeiT and DeiT III, heads."""

from pathlib import Path

import mmpretrain
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.registry import MODELS, PARAM_SCHEDULERS, init_default_scope

from .all_configs import ROOT, load_config


def load(name):
    return load_config(ROOT / f'configs/image_classification/{name}.py')


def test_no_config_adds_weight_decay_to_the_gradient_of_adam():
    """Decay of 0.1 or 0.5 in Adam's gradient collapses the weights; AdamW decouples the two."""
    checked = 0
    for path in (ROOT / 'configs').rglob('*.py'):
        if '_base_' in path.parts or path.parent.name in ('detection', 'segmentation', 'own_data'):
            continue  # hosts may be missing; their configs inherit the same schedules or those of mmdet
        optimizer = load_config(path).optim_wrapper.optimizer
        coupled = optimizer.type in ('Adam', 'RAdam', 'NAdam', 'Adagrad', 'RMSprop')
        assert not (coupled and optimizer.get('weight_decay')), path
        checked += 1
    assert checked > 150


# Numbers that READMEs give as the papers', by config and entry.
RECIPES = {
    'image_ar/aft-local-256-l12-d512_8xb16-200e_cifar10': {
        'param_scheduler.0.end': 4000,
        'param_scheduler.1.begin': 4000,
    },
    'language_modeling/aft-local-32-l24-d256_8xb16-100e_enwik8-t1024': {
        'param_scheduler.0.end': 4000,
    },
    'machine_translation/aft-simple-base_8xb4096-200k_wmt14-en-de': {
        'optim_wrapper.optimizer.betas': (0.9, 0.998),
        'optim_wrapper.optimizer.eps': 1e-9,
        'test_cfg.beam_size': 4,
        'test_cfg.length_penalty': 0.6,
    },
    'speech_recognition/aft-conv-l9-h6-k15_1xb16-100e_wsj': {
        'param_scheduler.0.patience': 3,
        'train_dataloader.batch_sampler.max_length': 24_000,
    },
    'super_resolution/aft-local2d-l32-d256_8xb16-200e_celeba-8to32': {
        'train_dataloader.dataset.pipeline.1.crop_size': 138,
    },
    'point_cloud/aft-local-256-l24-d256_8xb16-1000e_shapenet-chair': {
        'train_dataloader.dataset.pipeline.1.num_points': 2048,
        'train_dataloader.dataset.pipeline.1.num_bits': 8,
    },
    'image_classification/deit-small_8xb128-300e_in1k': {
        'custom_hooks.0.momentum': 4e-5,
        'param_scheduler.0.end': 5,
    },
}


@pytest.mark.parametrize('name', RECIPES)
def test_numbers_of_the_papers(name):
    config = load_config(ROOT / f'configs/{name}.py')
    for key, value in RECIPES[name].items():
        found = config
        for part in key.split('.'):
            found = found[int(part)] if part.isdigit() else found[part]
        assert found == value, key


def test_larger_crops_change_sizes_only():
    """The 384 px pipeline of DeiT, compared with that of 224 px."""
    small, large = (
        Config.fromfile(ROOT / f'configs/_base_/datasets/{name}.py')
        for name in ('imagenet_deit_224', 'imagenet_deit_384')
    )

    def settings(steps):
        return [{k: v for k, v in x.items() if k not in ('scale', 'crop_size')} for x in steps]

    for split in ('train', 'val'):
        pipelines = (config[f'{split}_dataloader'].dataset.pipeline for config in (small, large))
        one, other = map(settings, pipelines)
        assert one == other
    assert small.data_preprocessor == large.data_preprocessor


@pytest.mark.parametrize('name, heads', [('lambda-tiny', 3), ('lambda-small', 6)])
def test_lambda_networks_have_the_heads_of_table_7(name, heads):
    assert load(f'{name}_8xb128-300e_in1k').model.backbone.token_mixer.num_heads == heads


def test_deit_recipe():
    """Compared with mmpretrain's DeiT where it follows the paper, otherwise with the paper."""
    ours = load('deit-small_8xb128-300e_in1k')
    shipped = Path(mmpretrain.__file__).parent / '.mim' / 'configs' / 'deit'
    theirs = Config.fromfile(shipped / 'deit-small_4xb256_in1k.py')

    for loader in ('train_dataloader', 'val_dataloader'):
        assert ours[loader].dataset.pipeline == theirs[loader].dataset.pipeline
    assert ours.data_preprocessor == theirs.data_preprocessor
    assert ours.model.train_cfg == theirs.model.train_cfg
    assert ours.model.head.loss == theirs.model.head.loss
    assert ours.optim_wrapper.optimizer == theirs.optim_wrapper.optimizer
    assert ours.auto_scale_lr == theirs.auto_scale_lr
    assert ours.train_dataloader.sampler == dict(
        type='RepeatAugSampler', shuffle=True, num_repeats=3
    )
    assert ours.model.backbone.drop_path_rate == 0.1
    assert ours.train_dataloader.drop_last


def test_deit3_recipe():
    """Compared with the training command for ViT-S in the code of DeiT III, including the loss."""
    config, deit = (
        load(f'aft-conv-small-h384-k11_{what}_in1k')
        for what in ('8xb256-800e-deit3', '8xb128-300e')
    )
    assert config.optim_wrapper.optimizer == dict(type='Lamb', lr=4e-3, weight_decay=0.05)
    assert config.optim_wrapper.paramwise_cfg == deit.optim_wrapper.paramwise_cfg
    warmup, cosine = config.param_scheduler
    assert 4e-3 * warmup.start_factor == pytest.approx(1e-6) and warmup.end == cosine.begin == 5
    assert config.model.backbone == {**deit.model.backbone, 'drop_path_rate': 0.05}
    assert config.model.train_cfg == deit.model.train_cfg  # mixup 0.8, cutmix 1
    assert config.train_dataloader.sampler == deit.train_dataloader.sampler  # repeated
    assert config.val_dataloader == deit.val_dataloader

    init_default_scope('mmpretrain')
    loss = MODELS.build(config.model.head.loss)
    scores, target = torch.randn(4, 1000), torch.rand(4, 1000)
    torch.testing.assert_close(
        loss(scores, target, avg_factor=4),
        torch.nn.functional.binary_cross_entropy_with_logits(scores, target),
    )

    # One of greyscale, solarisation and blur, then colour jitter.
    augment = Compose(config.train_dataloader.dataset.pipeline[3:4])
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    kinds = set()
    np.random.seed(0)
    for _ in range(20):
        out = augment(dict(img=image.copy()))['img']
        kinds.add(
            'grey'
            if (out == out[..., :1]).all()
            else 'solar'
            if (np.minimum(out, 255 - out) == np.minimum(image, 255 - image)).all()
            else 'blur'
            if out.std() < image.std()
            else 'none'
        )
    assert kinds == {'grey', 'solar', 'blur'}


def test_learning_rate_warms_up_for_five_epochs():
    config, epoch_length = load('deit-tiny_8xb128-300e_in1k'), 4
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    schedulers = []
    for settings in config.param_scheduler:
        settings = dict(dict(end=300), **settings)
        kind = PARAM_SCHEDULERS.get(settings.pop('type'))
        settings.pop('convert_to_iter_based', None)
        settings.update({key: settings[key] * epoch_length for key in ('begin', 'end')})
        schedulers.append(kind(optimizer, by_epoch=False, **settings))
    rates = []
    for _ in range(300 * epoch_length):
        rates.append(optimizer.param_groups[0]['lr'])
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()

    assert rates[0] == pytest.approx(1e-6)
    assert max(rates) == pytest.approx(1e-3) and rates.index(max(rates)) == 5 * epoch_length - 1
    assert rates[-1] == pytest.approx(1e-5, rel=0.01)
