"""The CUDA backend: fused Triton kernels.

AFT-full, AFT-local and AFT-conv are weighted products and share `weights.py` (W), `operands.py`
(what W is multiplied with), `matmul.py`, `tiling.py` and `recompute_flagged.py`. AFT-simple and the
steps share `online_softmax.py`. Only `availability.py` can be imported where Triton is missing.
"""
