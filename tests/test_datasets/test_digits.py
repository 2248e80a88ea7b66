"""The digits of scikit-learn and their split."""

import sys

import numpy as np
import pytest
from sklearn.datasets import load_digits

from aft_mm.datasets import Digits


def as_bytes(dataset):
    return [(sample['img'].tobytes(), sample['gt_label']) for sample in dataset]


def test_splits_are_disjoint_complete_and_deterministic():
    digits = load_digits()
    train, test = as_bytes(Digits('train')), as_bytes(Digits('test'))
    np.random.seed(1)
    assert as_bytes(Digits('test')) == test
    everything = [
        (np.rint(image * 255 / 16).astype(np.uint8).tobytes(), int(label))
        for image, label in zip(digits.images, digits.target, strict=True)
    ]

    assert (len(train), len(test)) == (1437, 360)
    # As multisets, so that no image is in both splits or left out.
    assert sorted(train + test) == sorted(everything)


def test_test_split_is_a_fifth_of_every_class():
    train, test = (
        np.bincount([sample['gt_label'] for sample in Digits(split)]) for split in ('train', 'test')
    )

    np.testing.assert_allclose(test / (train + test), 0.2, atol=0.005)


def test_images_use_the_whole_grey_scale():
    images = np.stack([sample['img'] for sample in Digits('train')])

    assert images.shape[1:] == (8, 8, 1) and images.dtype == np.uint8
    assert images.min() == 0 and images.max() == 255


def test_unknown_split_and_missing_scikit_learn_are_named(monkeypatch):
    with pytest.raises(ValueError, match="split must be one of train, test, got 'val'"):
        Digits('val')
    monkeypatch.setitem(sys.modules, 'sklearn.datasets', None)
    with pytest.raises(ImportError, match='Digits needs the images .* pip install scikit-learn'):
        Digits()
