"""The CUDA backend: fused Triton kernels; what they serve stands in `support.py`.

NAME_kernels.py is what runs on the device. How the work is cut and launched and the op at the
torch.library boundary with its gradient stand in NAME.py, of some ops in NAME_launch.py and
NAME_library.py; `register.py` makes ops, `blocks.py` has the sizes of blocks.
`library.py` gathers the ops. It imports Triton, this file does not.
"""
