from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aft_mm.checks import check_int, is_int, refuse
from aft_mm.layers import Resettable
from aft_mm.registry import MODELS

from ..decoding.generation import sample_categorical

LOG_SCALE_LIMIT = 7.0


@MODELS.register_module()
class LogisticMixtureHead(Resettable):
    """Discretised mixture of K logistics per pixel (arXiv 1701.05517, eq. 2 and 3).

    With x = value / 127.5 − 1, bins of half width 1/255 and σ the logistic function,

    ``p(x) = Σ_k π_k Π_c [σ((x_c + 1/255 − μ_kc) / s_kc) − σ((x_c − 1/255 − μ_kc) / s_kc)]``

    where the bins of 0 and 255 extend to −∞ and ∞. Of three channels, later means are ``μ_G + α
    x_R`` and ``μ_B + β x_R + γ x_G``, with α, β, γ the tanh of further outputs. Log scales are
    clamped to ±7.

    Args:
        num_channels: Colours C of a pixel, 1 or 3.
        num_components: K.
    """

    num_values = 256

    def __init__(self, embed_dims: int, num_channels: int, num_components: int = 10) -> None:
        super().__init__()
        check_int('embed_dims', embed_dims, 1)
        if not is_int(num_channels) or num_channels not in (1, 3):
            refuse('num_channels', '1 or 3', num_channels)
        check_int('num_components', num_components, 1)
        self.embed_dims = embed_dims
        self.num_channels = self.dims_per_token = num_channels
        self.token_shape = () if num_channels == 1 else (num_channels,)
        coefficients = num_channels * (num_channels - 1) // 2
        self.split = (1, num_channels, num_channels, coefficients)
        self.proj = nn.Linear(embed_dims, num_components * sum(self.split))
        nn.init.trunc_normal_(self.proj.weight, std=0.02)
        nn.init.zeros_(self.proj.bias)

    def nats(self, hidden: Tensor, targets: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``−log p(target)`` [...] in `dtype`, summed over channels.

        Args:
            hidden: [..., D].
            targets: Integers 0 … 255 [..., C], or [...] with one channel.
            dtype: Type of the result.

        Raises:
            ValueError: Targets of another shape, or not of integers.
        """
        shape = (*hidden.shape[:-1], self.num_channels)
        if self.num_channels == 1 and targets.shape == shape[:-1]:
            targets = targets.unsqueeze(-1)
        if targets.shape != shape or targets.is_floating_point():
            raise ValueError(
                f'targets must be integers {list(shape)}, got {targets.dtype} {list(targets.shape)}'
            )
        log_pi, mean, log_scale, coefficient = self._mixture(hidden, dtype)
        targets = targets.unsqueeze(-2)
        mean = _conditional(mean, coefficient, _scaled(targets, dtype))
        log_p = _log_bin(targets, mean, log_scale).sum(-1)
        return -(log_pi + log_p).logsumexp(-1)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return :meth:`nats`, [...]."""
        return self.nats(hidden, targets)

    def sample(self, hidden: Tensor, **options: Any) -> Tensor:
        """Sample a pixel per row of hidden [B, D], int64 [B, C], or [B] with one channel.

        For `options` see :func:`sample_categorical`.
        """
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_weight, mean, log_scale, coefficient = self._mixture(hidden, dtype)
        values = torch.arange(self.num_values, device=hidden.device)
        pixel = torch.zeros(len(hidden), self.num_channels, dtype=torch.long, device=hidden.device)
        for c in range(self.num_channels):
            given = _conditional(mean, coefficient, _scaled(pixel[:, None], mean.dtype))
            log_p = _log_bin(values, given[..., c, None], log_scale[..., c, None])
            logits = (log_weight[..., None] + log_p).logsumexp(1)
            pixel[:, c] = sample_categorical(logits, **options)
            chosen = pixel[:, None, c, None].expand(-1, log_p.shape[1], 1)
            log_weight = log_weight + log_p.gather(-1, chosen).squeeze(-1)
        return pixel if self.num_channels > 1 else pixel.squeeze(1)

    def _mixture(self, hidden: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return log π [..., K], means and log scales [..., K, C], coefficients [..., K, C(C−1)/2]."""
        # Rounding would move a mean by a bin.
        with torch.autocast(hidden.device.type, enabled=False):
            weight, bias = self.proj.weight.to(dtype), self.proj.bias.to(dtype)
            outputs = F.linear(hidden.to(dtype), weight, bias)
        outputs = outputs.unflatten(-1, (-1, sum(self.split)))
        logit, mean, log_scale, coefficient = outputs.split(self.split, dim=-1)
        log_scale = log_scale.clamp(-LOG_SCALE_LIMIT, LOG_SCALE_LIMIT)
        return logit.squeeze(-1).log_softmax(-1), mean, log_scale, coefficient.tanh()


def _scaled(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype) / 127.5 - 1


def _conditional(mean: Tensor, coefficient: Tensor, x: Tensor) -> Tensor:
    """Return the means [..., K, C] given the earlier channels of x [..., 1, C]."""
    if mean.shape[-1] == 1:
        return mean
    red, green = x[..., 0], x[..., 1]
    mean_red, mean_green, mean_blue = mean.unbind(-1)
    alpha, beta, gamma = coefficient.unbind(-1)
    mean_green = mean_green + alpha * red
    mean_blue = mean_blue + beta * red + gamma * green
    return torch.stack([mean_red, mean_green, mean_blue], dim=-1)


def _log_bin(values: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """Return log σ(a) σ(−b) (1 − e^(b − a)) of the bin of each value, which does not cancel."""
    inverse = torch.exp(-log_scale)
    centred = _scaled(values, mean.dtype) - mean
    below = F.logsigmoid(inverse * (centred + 1 / 255))
    above = F.logsigmoid(-inverse * (centred - 1 / 255))
    inside = torch.log(-torch.expm1(-inverse * (2 / 255)))
    first, last = values == 0, values == 255
    return (
        below.masked_fill(last, 0)
        + above.masked_fill(first, 0)
        + inside.expand_as(below).masked_fill(first | last, 0)
    )
