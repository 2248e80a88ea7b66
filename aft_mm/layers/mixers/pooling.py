from aft_mm.registry import MODELS

from .depthwise_conv import KernelMixer


@MODELS.register_module()
class Pooling(KernelMixer):
    """The gated mean of the visible tokens around each one, a control without learned weights.

    ``y_t = proj(g(q_t) ⊙ mean_t' v_t')`` over the kernel, as in PoolFormer (arXiv 2111.11418).
    """

    example = dict(kernel_size=3)
    normalized = True
    average = True
