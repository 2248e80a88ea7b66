"""The CPU backend: loops in C++ for AFT-conv and causal AFT-simple, with their gradients.

What composite operations pass through memory again and again stays in the cache of a core here:
`conv.cpp` and `simple.cpp` say how, on `vectors.h` (lanes, float32 and bfloat16, the exponential)
and `tokens.h` (tensors, heads). setup.py builds them into the wheel, once for each set of
instructions; without them, as without a compiler, eager serves. They know nothing of torch:
`library.py` hands over addresses and strides. `support.py` loads them and says what they serve.
"""
