"""Inferencers of mmdet and mmseg, and `aft_mm predict`, on our models."""

import json

import numpy as np
import pytest
import torch
from mmdet.apis import DetInferencer
from mmengine.config import Config
from mmseg.apis import MMSegInferencer, inference_model, init_model
from PIL import Image

from aft_mm.apis.loading import build_model, load_model

from ..all_configs import configs_of

CONFIGS = configs_of('detection', 'segmentation')


@pytest.fixture
def checkpoint(tmp_path):
    def write(name, classes):
        config = Config.fromfile(CONFIGS[name])
        config.dump(tmp_path / 'config.py')
        torch.manual_seed(0)
        model = build_model(config)
        meta = dict(classes=classes, palette=[[i, i, i] for i in range(len(classes))])
        whole = dict(state_dict=model.state_dict(), meta=dict(dataset_meta=meta))
        torch.save(whole, tmp_path / 'config.pth')
        return str(tmp_path / 'config.py'), str(tmp_path / 'config.pth')

    return write


def test_mmdet_inferencer(checkpoint, tool, here):
    classes = ('Platelets', 'RBC', 'WBC')
    files = checkpoint('retinanet-aft-conv-mini_1xb4-24e_bccd', classes)
    infer = DetInferencer(*files, device='cpu', show_progress=False)
    image = np.random.default_rng(0).integers(0, 256, (60, 84, 3), dtype=np.uint8)
    ((found,),) = [infer(image, pred_score_thr=0)['predictions']]
    _, model = load_model(*files, 'cpu')
    assert infer.visualizer.dataset_meta['classes'] == classes
    assert type(model.backbone).__name__ == 'AFTViT'
    batch = {key: [value] for key, value in infer.pipeline(image).items()}
    with torch.no_grad():
        expected = model.test_step(batch)[0].pred_instances
    assert len(found['bboxes']) == len(expected) > 0
    np.testing.assert_allclose(found['bboxes'], expected.bboxes, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(found['scores'], expected.scores, rtol=1e-4)

    sizes = ((60, 84), (41, 50))
    images = [image[:height, :width] for height, width in sizes]
    for number, pixels in enumerate(images):
        Image.fromarray(pixels).save(f'{number}.png')
    scores = sorted(infer('0.png', pred_score_thr=0)['predictions'][0]['scores'])
    score = sum(scores[-9:-7]) / 2  # between the eighth and the ninth
    words = ['0.png', '1.png', '--out', 'out', '--score', str(score)]
    tool('predict').main([*files, *words, '--device', 'cpu'])
    for one, size in zip(json.loads(open('out/predictions.json').read()), sizes, strict=True):
        theirs = infer(one['path'], pred_score_thr=0)['predictions'][0]
        kept = [i for i, value in enumerate(theirs['scores']) if value > score]
        boxes = [box['box'] for box in one['found']]
        np.testing.assert_allclose(
            np.reshape(boxes, (-1, 4)), np.reshape(theirs['bboxes'], (-1, 4))[kept], atol=1e-2
        )
        assert [box['label'] for box in one['found']] == [theirs['labels'][i] for i in kept]
        assert all(box['class_name'] == classes[box['label']] for box in one['found'])
        times = -(-224 // min(size))  # small pictures are magnified
        shape = (times * size[0], times * size[1], 3)
        assert np.array(Image.open(f'out/{one["picture"]}')).shape == shape
    assert len(json.loads(open('out/predictions.json').read())[0]['found']) == 8
    header = open('out/predictions.csv').readline()
    assert header == 'path,class_name,label,score,x1,y1,x2,y2\n'


def test_mmseg_inference(checkpoint, tool, here):
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
    inferred = MMSegInferencer(*files, device='cpu')(image)['predictions']
    np.testing.assert_array_equal(inferred, mask[0])
    _, model = load_model(*files, 'cpu')
    for name, value in model.state_dict().items():
        assert torch.equal(host.state_dict()[name], value), name

    for number, pixels in enumerate((image, image[:40])):
        Image.fromarray(pixels).save(f'{number}.png')
    tool('predict').main([*files, '0.png', '1.png', '--out', 'out', '--device', 'cpu'])
    first, second = json.loads(open('out/predictions.json').read())
    written = np.array(Image.open(f'out/{first["mask"]}'))
    theirs = inference_model(host, image[..., ::-1].copy()).pred_sem_seg.data[0].numpy()
    assert (written == theirs).mean() > 0.999
    assert sum(one['share'] for one in first['found']) == pytest.approx(1)
    assert open('out/predictions.csv').readline() == 'path,class_name,label,share\n'
    assert {one['class_name'] for one in first['found']} == {classes[i] for i in np.unique(written)}
    assert np.array(Image.open(f'out/{second["picture"]}')).shape == (6 * 40, 6 * 84, 3)
