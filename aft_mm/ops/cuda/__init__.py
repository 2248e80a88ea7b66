"""AFT-conv in CUDA C++, which NVRTC compiles when a call first needs it.

`conv_small.cu` has the kernels for small maps and `conv_any.cu` those for all others; they share
`conv.h` and `warp.h`. `nvrtc.py` compiles, stores and launches, `conv.py` is the operator, and
`availability.py` names the calls that it supports.
"""
