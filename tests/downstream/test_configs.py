"""Every config of detection and segmentation loads, builds and matches its name."""

import json
import re
from pathlib import Path

import mmdet
import mmseg
import numpy as np
import pytest
import torch
import yaml
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DATASETS, RUNNERS
from PIL import Image

from ..all_configs import ROOT, build_model, configs_of, fields, load_config
from ..documents import blocks
from ..helpers import nightly

pytestmark = pytest.mark.slow

TASKS = ('detection', 'segmentation')
CONFIGS = configs_of(*TASKS)
MODELS = {
    'mask-rcnn': 'MaskRCNN',
    'retinanet': 'RetinaNet',
    'upernet': 'UPerHead',
    'fcn': 'FCNHead',
}
# First letters of the data folder, if not the first word of the name.
FOLDERS = {'voc0712': 'vocdevkit', 'ade20k': 'ade'}
DIMS = dict(mini=96, tiny=192, small=384)
DETECTORS = [name for name in CONFIGS if CONFIGS[name].parent.name == 'detection']
MINI = [name for name in CONFIGS if fields(name)['gpus'] == 1]
FULL = [name for name in CONFIGS if name not in MINI]
MIXERS = {'aft-conv': 'AFTConv', 'pooling': 'Pooling'}

every_config = pytest.mark.parametrize('name', CONFIGS)


def load(name):
    return load_config(CONFIGS[name])


def build(name):
    return build_model(CONFIGS[name])


def innermost(dataset):
    if 'dataset' in dataset:
        return innermost(dataset.dataset)
    return dataset.get('datasets', [dataset])


def heads(model):
    if 'roi_head' in model:
        return [model.roi_head.bbox_head, model.roi_head.mask_head]
    return [model[name] for name in ('bbox_head', 'decode_head', 'auxiliary_head') if name in model]


@every_config
def test_model_matches_the_name(name):
    field, model, built = fields(name), load(name).model, build(name)
    task_model = model.type if name in DETECTORS else model.decode_head.type
    head, backbone = re.fullmatch('(mask-rcnn|[a-z]+)-(.+)', field['family']).groups()
    assert task_model == MODELS[head]
    if backbone == 'resnet18':
        assert type(built.backbone).__name__ in ('ResNet', 'ResNetV1c')
        assert built.backbone.depth == 18
        return
    dims, mini = DIMS[field['size']], field['size'] == 'mini'
    mixer = built.backbone.layers[0].token_mixer
    assert type(mixer).__name__ == MIXERS[backbone]
    assert mixer.embed_dims == dims and len(built.backbone.layers) == (5 if mini else 12)
    kernel = 7 if mini else 11
    if backbone == 'aft-conv':
        assert mixer.position_bias().shape == (dims, kernel, kernel)
    else:
        assert mixer.kernel_size == (kernel, kernel)
    assert model.backbone.patch_size == (8 if mini else 16)
    assert model.backbone.get('conv_stem', False) == (field['what'] == 'conv-stem')


@every_config
def test_schedule_matches_the_name(name):
    field, config = fields(name), load(name)
    assert config.train_dataloader.batch_size == field['batch']
    length = config.train_cfg['max_iters' if field['unit'] in 'ik' else 'max_epochs']
    assert length == field['length'] * dict(k=1000, x=12).get(field['unit'], 1)
    assert config.param_scheduler[-1].get('end', length) == length
    if name in FULL:
        total = field['gpus'] * field['batch']
        assert config.auto_scale_lr == dict(enable=False, base_batch_size=total)
    else:
        assert field['gpus'] == 1


@every_config
def test_data_matches_the_name(name, monkeypatch):
    monkeypatch.delenv('AFT_MM_DATA', raising=False)
    config, field = load(name), fields(name)
    data, _, size = field['data'].partition('-')
    num_classes = {head.num_classes for head in heads(config.model)}
    for split in ('train', 'val', 'test'):
        for dataset in innermost(config[f'{split}_dataloader'].dataset):
            folder = dataset.data_root.rstrip('/')
            assert folder.lower().startswith(f'data/{FOLDERS.get(data, data)}')
            kind = dataset.type if '.' in dataset.type else f'{config.default_scope}.{dataset.type}'
            metainfo = dataset.get('metainfo') or DATASETS.get(kind).METAINFO
            assert {len(metainfo['classes'])} == num_classes
            assert split == 'train' or dataset.get('test_mode') or data == 'ade20k'
            if split != 'train':
                evaluator = config[f'{split}_evaluator']
                assert evaluator.get('ann_file', f'{folder}/').startswith(f'{folder}/')
    if field['what'] not in (None, 'conv-stem'):
        assert config.train_dataloader.dataset.metainfo.classes == (field['what'],)
    if size.endswith('px'):
        size = (int(size.removesuffix('px')),) * 2
        assert config.model.data_preprocessor.preprocessor.size == size
        assert config.train_dataloader.dataset.pipeline[3].crop_size == size


@pytest.mark.parametrize('name', DETECTORS)
def test_feature_maps_have_the_sizes_that_anchors_expect(name):
    config, model = load(name), build(name)
    channels = 3 if 'resnet' in name else 4  # the fourth is the mask
    maps = model.extract_feat(torch.zeros(1, channels, 256, 256, device='meta'))
    head = config.model.get('rpn_head', config.model.get('bbox_head'))
    strides = head.anchor_generator.strides
    assert list(strides) == [256 // x.shape[-1] for x in maps]
    if 'roi_head' in config.model:
        extractor = config.model.roi_head.bbox_roi_extractor
        assert list(extractor.featmap_strides) == list(config.model.neck.strides)


@every_config
def test_base_configs_of_hosts_inherit_nothing(name):
    """So inheritance is at most three files deep, including those of hosts."""
    files = [CONFIGS[name]]
    while files:
        text = (file := files.pop()).read_text()
        bases = re.findall(r"'([^']+)'", text.partition('_base_ =')[2].partition('\n\n')[0])
        for base in bases:
            package, _, path = base.rpartition('::')
            if package:
                host = Path(dict(mmdet=mmdet, mmseg=mmseg)[package].__file__).parent
                assert '_base_ =' not in (host / '.mim/configs' / path).read_text()
            else:
                files.append(file.parent / path)


@every_config
def test_pipelines_match_the_input_of_the_model(name, tmp_path):
    config = load(name)
    rng = np.random.default_rng(0)
    path = tmp_path / 'image.png'
    Image.fromarray(rng.integers(0, 256, (361, 481, 3), dtype=np.uint8)).save(path)
    Image.fromarray(rng.integers(0, 12, (361, 481), dtype=np.uint8)).save(tmp_path / 'labels.png')
    polygon = [[30.0, 20.0, 200.0, 20.0, 200.0, 300.0]]
    box = dict(bbox=[30, 20, 200, 300], bbox_label=0, ignore_flag=0, mask=polygon)

    for split in ('train', 'test'):
        for dataset in innermost(config[f'{split}_dataloader'].dataset):
            ade20k = dataset.type == 'ADE20KDataset'
            frame = dict(img_path=str(path), img_id=0, height=361, width=481, instances=[box])
            frame |= dict(seg_map_path=str(tmp_path / 'labels.png'), seg_fields=[])
            packed = Compose(dataset.pipeline)(
                dict(frame, label_map=None, reduce_zero_label=ade20k)
            )
            sample = packed['data_samples']
            assert packed['inputs'].dtype == torch.uint8 and packed['inputs'].ndim == 3
            assert packed['inputs'].shape[1:] == sample.img_shape
            if name not in DETECTORS:
                # The ground truth of a test has the original image size.
                size = sample.img_shape if split == 'train' else (361, 481)
                assert sample.gt_sem_seg.shape == size
            else:
                assert sample.gt_instances.labels.tolist() == [0]
                assert ('masks' in sample.gt_instances) == ('mask-rcnn' in name)


@every_config
def test_biases_and_norms_are_not_decayed(name):
    model = build(name)
    groups = build_optim_wrapper(model, load(name).optim_wrapper).optimizer.param_groups
    decayed = {id(p): group['weight_decay'] for group in groups for p in group['params']}
    weight_decay = load(name).optim_wrapper.optimizer.weight_decay

    assert len(decayed) == len(list(model.parameters()))
    for parameter_name, parameter in model.named_parameters():
        spared = parameter.ndim == 1 or 'pos_bias' in parameter_name
        assert decayed[id(parameter)] == (0.0 if spared else weight_decay), parameter_name


@pytest.mark.parametrize('name', FULL)
def test_learning_rate_falls_from_the_heads_to_the_embedding(name):
    model, wrapper = build(name), load(name).optim_wrapper
    groups = build_optim_wrapper(model, wrapper).optimizer.param_groups
    rates = {id(p): group['lr'] for group in groups for p in group['params']}
    decay, rate = wrapper.paramwise_cfg.decay_rate, wrapper.optimizer.lr
    assert wrapper.constructor == 'aft_mm.LayerDecayOptimWrapperConstructor' and decay < 1
    for parameter_name, parameter in model.named_parameters():
        depth = 13  # the heads, the neck and the last norm
        if layer := re.match(r'backbone\.layers\.(\d+)', parameter_name):
            depth = int(layer[1]) + 1
        elif parameter_name.startswith('backbone.patch_embed'):
            depth = 0
        assert rates[id(parameter)] == pytest.approx(rate * decay ** (13 - depth)), parameter_name


@pytest.mark.parametrize('task', TASKS)
def test_metafile_has_the_number_of_parameters(task):
    listed = yaml.safe_load((ROOT / f'configs/{task}/metafile.yml').read_text())['Models']
    for model in listed:
        counted = sum(parameter.numel() for parameter in build(model['Name']).parameters())
        assert model['Metadata']['Parameters'] == counted, model['Name']


def test_example_of_the_guide_builds(tmp_path):
    example, *_ = blocks('docs/tasks/dense_prediction.md', 'python')
    (tmp_path / 'example.py').write_text(example)
    config = load_config(tmp_path / 'example.py')
    model = build_model(tmp_path / 'example.py')
    assert model.backbone.embed_dims == model.neck.in_channels
    wrapper = build_optim_wrapper(model, config.optim_wrapper)
    rates = {group['lr'] for group in wrapper.optimizer.param_groups}
    assert min(rates) == pytest.approx(1e-4 * 0.8**13) and max(rates) == 1e-4
    maps = model.extract_feat(torch.zeros(2, 4, 64, 96, device='meta'))
    expected = [(2, 256, -(-64 // stride), -(-96 // stride)) for stride in (8, 16, 32, 64, 128)]
    assert [tuple(x.shape) for x in maps] == expected


METRICS = {
    'coco-mini': {'coco/bbox_mAP', 'coco/segm_mAP'},
    'bccd': {'coco/bbox_mAP_50'},
    'bccd-voc': {'pascal_voc/mAP'},
    'camvid': {'mIoU'},
    'camvid-objects': {'coco/bbox_mAP', 'coco/segm_mAP'},
}


# One of each task and data set; UPerNet also trains the head of FCN.
FIRST = (
    'mask-rcnn-aft-conv-mini_1xb4-160e-person_coco-mini',
    'retinanet-aft-conv-mini_1xb4-24e_bccd',
    'upernet-aft-conv-mini_1xb4-1200i_camvid',
)


@pytest.mark.parametrize('name', nightly(MINI, lambda name: name not in FIRST))
def test_small_models_train_two_iterations_and_are_tested(name, shared_data, tmp_path, monkeypatch):
    data = fields(name)['data']
    monkeypatch.setenv('AFT_MM_DATA', str(shared_data))
    config = Config.fromfile(CONFIGS[name])
    folder = Path(innermost(config.test_dataloader.dataset)[0].data_root)
    if not folder.is_dir():
        pytest.skip(f'the pack {folder.name} is not at {shared_data}')
    length = 'max_iters' if 'max_iters' in config.train_cfg else 'max_epochs'
    options = {
        'work_dir': str(tmp_path),
        'experiment_name': tmp_path.name,
        'param_scheduler': None,
        'train_dataloader.batch_size': 2,
        f'train_cfg.{length}': 2 if length == 'max_iters' else 1,
    }
    for split, indices in dict(train=4, val=2, test=2).items():
        options[f'{split}_dataloader.dataset.indices'] = indices
        options[f'{split}_dataloader.num_workers'] = 0
        options[f'{split}_dataloader.persistent_workers'] = False
    config.merge_from_dict(options)
    if 'retinanet' in name:  # so that an untrained model finds objects
        config.model.test_cfg.score_thr = 0.0
    runner = RUNNERS.build(config)
    weight = next(runner.model.backbone.parameters())
    before = weight.detach().clone()
    runner.train()
    assert runner.iter == 2
    assert not torch.equal(before, weight)
    metrics = runner.test()
    dataset = runner.test_dataloader.dataset
    if hasattr(dataset, 'cat_ids'):  # in the order of the file, not of the names
        categories = json.loads(Path(dataset.ann_file).read_text())['categories']
        names = {category['id']: category['name'] for category in categories}
        assert tuple(names[i] for i in dataset.cat_ids) == dataset.metainfo['classes']
    assert METRICS[data] <= metrics.keys()
    assert all(np.isfinite(metrics[key]) for key in METRICS[data])
