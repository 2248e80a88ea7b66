"""Plots of models and runs, comparisons, complexity, samples of data sets."""


class AtMost(int):
    """A default number of samples; a smaller dataset gives all."""
