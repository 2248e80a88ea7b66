"""The CUDA backend: fused Triton kernels; what they serve stands in `support.py`.

NAME_kernels.py is what runs on the device. How the work is cut and launched and the op at the
torch.library boundary with its gradient stand in NAME.py, of some ops in NAME_launch.py and
NAME_library.py; `register.py` makes ops, `blocks.py` has the sizes of blocks.
AFT-full and AFT-local in all their forms are one product: `bias.py` makes W, `terms.py` what it is
multiplied with, `product.py` multiplies, `fix_up.py` does once more what float32 did not hold;
`product_cut.py` has its blocks, `normalized.py` puts three products together.
`library.py` gathers the ops. It imports Triton, this file does not.
"""
