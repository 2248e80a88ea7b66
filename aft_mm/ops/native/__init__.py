"""The CPU backend: loops in C++ for AFT-conv and causal AFT-simple, with their gradients.

Composite operations pass every intermediate result through memory; a loop keeps it in the cache of
a core. `conv_forward.cpp` and `conv_backward.cpp` (on `conv.h`) and `simple.cpp` explain how, on
`vectors.h` (lanes, float32 and bfloat16, the exponential) and `tensors.h` (tensors, heads).
setup.py builds them into the wheel, once for each set of instructions; without a compiler eager is
used. They are independent of torch: `bindings.py` passes addresses and strides.
`availability.py` finds the library and tells which calls it supports.
"""
