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
    assert example('train_images').train(epochs=6) > 0.7


def test_lightning_classifies_digits(example):
    pytest.importorskip('lightning', reason='lightning is not installed')
    assert example('lightning_images').train(epochs=6) > 0.7


def test_a_plain_loop_trains_a_language_model(example):
    text = b'the quick brown fox jumps over the lazy dog. ' * 20
    model, bits = example('train_text').train(text, steps=40)
    assert bits < 3  # 8 at the start, 4.4 for the frequencies of the letters alone
    prompt = list(text[:45])
    assert bytes(model.generate(60, [prompt])[0, :45].tolist()) == text[:45]


def test_torch_hub_builds_a_classifier(root):
    for name, arguments in CLASSIFIERS.items():
        with torch.device('meta'):
            model = torch.hub.load(str(root), name, source='local', num_classes=3)
            assert model(torch.randn(2, 3, 224, 224)).shape == (2, 3)
        assert type(model.backbone.layers[0].token_mixer).__name__ in str(arguments)
