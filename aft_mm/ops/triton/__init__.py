"""The CUDA backend: fused Triton kernels; what they serve stands in `support.py`.

Each op has three files: NAME_kernels.py, what runs on the device; NAME_launch.py, how the work is
cut and launched; NAME_library.py, the op at the torch.library boundary with its gradient.
`library.py` gathers the ops. It imports Triton, this file does not.
"""
