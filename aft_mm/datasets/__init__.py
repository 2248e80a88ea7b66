"""One file per kind of data."""

from .cifar_binary import CIFAR10Binary
from .digits import Digits

__all__ = ['CIFAR10Binary', 'Digits']
