"""Heads: from hidden vectors to likelihoods and samples."""

from .categorical_head import CategoricalHead
from .sampling import check_sampling, draw

__all__ = ['CategoricalHead', 'check_sampling', 'draw']
