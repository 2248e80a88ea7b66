"""The CPU backend: loops in C++ for AFT-conv and causal AFT-simple, with their gradients.

A loop keeps intermediate results in the cache. `conv_forward.cpp` and `conv_backward.cpp` (on
`conv.h`) and `simple.cpp` use `vectors.h` (lanes, float32 and bfloat16, the exponential) and
`tensors.h` (tensors, heads). setup.py builds them once for each set of instructions, independent of
torch; `bindings.py` passes addresses and strides, `availability.py` finds the library. Without a
compiler eager is used.
"""
