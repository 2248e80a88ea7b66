"""AFT under names and signatures that other code uses, right for any finite key and bias.

Replace an import, keep the calls and the checkpoints. docs/is_your_aft_right.md has the originals:
ICAM, aft-pytorch and External-Attention-pytorch (:class:`AFT_FULL`).
"""

import torch
from torch import Tensor, nn

from .ops import aft_full, aft_simple

__all__ = ['AFT_FULL', 'AFTFull', 'AFTLocal', 'AFTSimple', 'adaptation_attention_free_module']


def adaptation_attention_free_module(
    q: Tensor, k: Tensor, v: Tensor, adaptation_bias: Tensor, ninf_mask: Tensor | None = None
) -> Tensor:
    """Compute AFT-full with a bias per instance (arXiv 2105.14103, eq. 2; arXiv 2405.01906).

    Args:
        q: Query [B, N, D].
        k: Key [B, M, D].
        v: Value [B, M, D].
        adaptation_bias: w [B, N, M], any finite number.
        ninf_mask: [B, N, M], added to w; −inf hides a pair. A row without visible pairs is 0.
    """
    if ninf_mask is not None:
        if not ninf_mask.is_floating_point():
            raise ValueError(
                f'ninf_mask must be a tensor of floats, 0 or −inf, got {ninf_mask.dtype}'
            )
        adaptation_bias = adaptation_bias + ninf_mask
    return aft_full(q, k, v, adaptation_bias)


class _Projected(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.to_q = nn.Linear(dim, hidden_dim)
        self.to_k = nn.Linear(dim, hidden_dim)
        self.to_v = nn.Linear(dim, hidden_dim)
        self.project = nn.Linear(hidden_dim, dim)

    def _mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self._mix(self.to_q(x), self.to_k(x), self.to_v(x)))


class AFTSimple(_Projected):
    """AFT-simple (eq. 5).

    Args:
        max_seqlen: Not used.
        dim: Channels of the tokens.
        hidden_dim: Channels of query, key and value.
    """

    def __init__(self, max_seqlen: int, dim: int, hidden_dim: int = 64) -> None:
        super().__init__(dim, hidden_dim)

    def _mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return aft_simple(query, key, value)


class AFTFull(_Projected):
    """AFT-full with a free w (eq. 2).

    Args:
        max_seqlen: Largest number of tokens T.
        dim, hidden_dim: See :class:`AFTSimple`.
    """

    def __init__(self, max_seqlen: int, dim: int, hidden_dim: int = 64) -> None:
        super().__init__(dim, hidden_dim)
        self.wbias = nn.Parameter(nn.init.xavier_uniform_(torch.empty(max_seqlen, max_seqlen)))

    def _mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tokens = key.shape[1]
        return aft_full(query, key, value, self.wbias[:tokens, :tokens])


class AFTLocal(AFTFull):
    """AFT-local with a free w (eq. 4), which is learned, 0 where ``|t − t'| ≥ s``.

    Args:
        max_seqlen: Largest number of tokens T.
        dim, hidden_dim: See :class:`AFTSimple`.
        s: Window.
    """

    def __init__(self, max_seqlen: int, dim: int, hidden_dim: int = 64, s: int = 256) -> None:
        super().__init__(max_seqlen, dim, hidden_dim)
        self.s = s

    def _mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tokens = key.shape[1]
        bias = self.wbias[:tokens, :tokens]
        return aft_full(query, key, value, bias.tril(self.s - 1).triu(1 - self.s))


class AFT_FULL(nn.Module):  # noqa: N801, the name of the original
    """AFT-full without an output projection (eq. 2), in O(n² + n·d_model) memory per sample.

    Args:
        d_model: Channels.
        n: Number of tokens.
        simple: Without position bias, AFT-simple.
    """

    def __init__(self, d_model: int, n: int = 49, simple: bool = False) -> None:
        super().__init__()
        self.fc_q = nn.Linear(d_model, d_model)
        self.fc_k = nn.Linear(d_model, d_model)
        self.fc_v = nn.Linear(d_model, d_model)
        for layer in (self.fc_q, self.fc_k, self.fc_v):
            nn.init.normal_(layer.weight, std=0.001)
            nn.init.zeros_(layer.bias)
        self.position_biases = None if simple else nn.Parameter(torch.ones(n, n))

    def forward(self, input: Tensor) -> Tensor:
        """Return [B, n, d_model] of the same."""
        qkv = self.fc_q(input), self.fc_k(input), self.fc_v(input)
        if self.position_biases is None:
            return aft_simple(*qkv)
        return aft_full(*qkv, self.position_biases)
