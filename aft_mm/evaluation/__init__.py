"""Metrics; the name of every number carries its unit."""

from .likelihood import Likelihood

__all__ = ['Likelihood']
