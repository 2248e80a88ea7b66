"""The CUDA backend: fused Triton kernels.

Each file holds the kernels of an op, their launches, and the op with its gradient as a torch
operator. AFT-full, AFT-local, AFT-local-learned and AFT-conv are weighted products and share
`weights.py` (W), `operands.py` (what W is multiplied with), `matmul.py` (the products),
`tiling.py` (their tiles) and `recompute_flagged.py` (tiles that float32 did not hold).
AFT-simple, the hard window and the decoding steps share `online_softmax.py`.

`availability.py` lists what has a kernel, `block_sizes.py` the sizes of blocks per chip,
`torch_ops.py` registers operators, and `library.py` gathers the ops. Only `availability.py` can be
imported where Triton is missing.
"""
