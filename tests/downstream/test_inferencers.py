"""Unmodified DetInferencer of mmdet and inference_model of mmseg on our models."""

import numpy as np
import pytest
import torch
from mmdet.apis import DetInferencer
from mmengine.config import Config
from mmengine.registry import DefaultScope
from mmseg.apis import inference_model, init_model

from aft_mm.apis.loading import build_model, load_model

from ..all_configs import configs_of

CONFIGS = configs_of('detection', 'segmentation')


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """Write config and checkpoint of a model with one small layer like a training."""
    monkeypatch.setattr(DefaultScope, '_instance_dict', dict(DefaultScope._instance_dict))

    def write(name, classes):
        config = Config.fromfile(CONFIGS[name])
        config.dump(tmp_path / 'config.py')
        torch.manual_seed(0)
        model = build_model(config)
        meta = dict(
            dataset_meta=dict(classes=classes, palette=[[i, i, i] for i in range(len(classes))])
        )
        torch.save(dict(state_dict=model.state_dict(), meta=meta), tmp_path / 'config.pth')
        return str(tmp_path / 'config.py'), str(tmp_path / 'config.pth')

    return write


def test_mmdet_inferencer(checkpoint):
    classes = ('Platelets', 'RBC', 'WBC')
    files = checkpoint('retinanet-aft-conv-mini_1xb4-24e_bccd', classes)
    infer = DetInferencer(*files, device='cpu', show_progress=False)
    image = np.random.default_rng(0).integers(0, 256, (60, 84, 3), dtype=np.uint8)
    ((found,),) = [infer(image, pred_score_thr=0)['predictions']]
    _, model = load_model(*files, 'cpu')
    assert infer.visualizer.dataset_meta['classes'] == classes
    assert type(model.backbone).__name__ == 'AFTViT'
    data = infer.pipeline(image)
    with torch.no_grad():
        (expected,) = model.test_step(
            dict(inputs=[data['inputs']], data_samples=[data['data_samples']])
        )
    expected = expected.pred_instances
    assert len(found['bboxes']) == len(expected) > 0
    np.testing.assert_allclose(found['bboxes'], expected.bboxes, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(found['scores'], expected.scores, rtol=1e-4)


def test_mmseg_inference(checkpoint):
    config = Config.fromfile(CONFIGS['fcn-aft-conv-mini_1xb4-1200i_camvid'])
    classes = tuple(map(str, range(config.model.decode_head.num_classes)))
    files = checkpoint('fcn-aft-conv-mini_1xb4-1200i_camvid', classes)
    image = np.random.default_rng(0).integers(0, 256, (60, 84, 3), dtype=np.uint8)
    host = init_model(*files, device='cpu')
    result = inference_model(host, image)
    assert host.dataset_meta['classes'] == classes
    mask = result.pred_sem_seg.data
    assert mask.shape == (1, 60, 84) and len(mask.unique()) > 1
    assert torch.equal(result.seg_logits.data.argmax(0, keepdim=True), mask)
    _, model = load_model(*files, 'cpu')
    for name, value in model.state_dict().items():
        assert torch.equal(host.state_dict()[name], value), name
