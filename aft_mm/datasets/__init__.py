"""One file per kind of data."""

from .cifar_binary import CIFAR10Binary
from .digits import Digits
from .mnist_idx import MNISTIdx
from .text_file import TextFile
from .transforms import PackSequence, RandomValueShift

__all__ = ['CIFAR10Binary', 'Digits', 'MNISTIdx', 'PackSequence', 'RandomValueShift', 'TextFile']
