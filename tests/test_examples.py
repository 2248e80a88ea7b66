"""The examples run and learn, and torch.hub finds its entry points."""

import importlib

import pytest
import torch

from aft_mm.models import CLASSIFIERS


@pytest.fixture
def example(root, monkeypatch):
    monkeypatch.syspath_prepend(root / 'examples')
    return importlib.import_module


def test_a_plain_loop_classifies_digits(example):
    assert example('train_images').train(epochs=3) > 0.8


def test_lightning_classifies_digits(example):
    pytest.importorskip('lightning', reason='lightning is not installed')
    assert example('lightning_images').train(epochs=3) > 0.8


def test_a_plain_loop_trains_a_language_model(example):
    text = b'the quick brown fox jumps over the lazy dog. ' * 20
    model, bits = example('train_text').train(text, steps=60)
    assert bits < 1  # 8 at the start, about 4 for the frequencies of the letters alone
    prompt = list(text[:45])
    assert bytes(model.generate(90, [prompt], greedy=True)[0].tolist()) == text[:90]


def test_torch_hub_builds_a_classifier(root):
    options = dict(source='local', arch=dict(embed_dims=32, num_layers=1), num_classes=3)
    for name in CLASSIFIERS:
        model = torch.hub.load(str(root), name, img_size=32, **options)
        assert model(torch.randn(2, 3, 32, 32)).shape == (2, 3)
    assert torch.hub.list(str(root), source='local') == sorted(CLASSIFIERS)
