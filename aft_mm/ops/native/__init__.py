"""The CPU backend: loops in C++, with gradients.

They compute AFT-conv, causal AFT-simple, and AFT-full with a bias per sample.

setup.py builds them once per set of instructions, independent of torch; `bindings.py` calls them,
`availability.py` finds the library. Without one eager is used. `onnx_operator.cpp` is a library of
its own, AFT-conv for ONNX Runtime.
"""
