"""AFT-conv in CUDA C++, which NVRTC compiles when a call first needs it.

`conv_small.cu` has the kernels for small maps, `conv_any.cu` those for all others.
"""
