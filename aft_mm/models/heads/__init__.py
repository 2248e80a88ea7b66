"""Heads: likelihoods and samples from hidden vectors."""

from .categorical_head import CategoricalHead
from .ctc_head import CTCHead
from .logistic_mixture_head import LogisticMixtureHead

__all__ = ['CTCHead', 'CategoricalHead', 'LogisticMixtureHead']
