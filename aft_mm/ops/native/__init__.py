"""The CPU backend: loops in C++, with gradients, of AFT-conv, causal AFT-simple, and AFT-full with
a bias per sample.

setup.py builds them once per set of instructions. Without them eager is used.
"""
