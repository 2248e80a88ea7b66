"""Learned position biases in numbers: how narrow, how far and where to, per layer and head."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from aft_mm.checks import check_int

#: What the offsets of a grid of so many dimensions are called.
AXES = {1: ('offset',), 2: ('row', 'column'), 3: ('depth', 'row', 'column')}


def position_bias_table(
    biases: Mapping[str, Tensor],
    grid: Sequence[int] | None = None,
    num_prefix_tokens: int = 0,
    causal: bool = False,
    top: int = 5,
) -> list[dict[str, str | int | float]]:
    """Statistics of ``p = exp(w) / Σ exp(w)``, a dict of a CSV's row per layer and head.

    ========================  ==================================================================
    ``layer``, ``head``       as in ``biases``; a dense w has one head
    ``top``                   share of the mass in the ``top`` largest places of p
    ``entropy_bits``          −Σ p log₂ p; the regulariser of equation 9 is its sum in nats
    ``centre_row``, …         Σ p · offset, source − target, in tokens
    ``width``                 √(Σ p (offset − centre)²) in tokens, over all dimensions
    ========================  ==================================================================

    Of ``[h, *kernel]`` p is over the kernel alone. Of ``[1, T, T]`` it is a distribution over the
    sources of each target token of the grid, prefix tokens left out and, if ``causal``, without
    later ones, and the numbers are means over the targets.

    Raises:
        ValueError: ``top`` is below 1, or a w is neither ``[h, *kernel]`` nor ``[1, T, T]`` of the
            grid.
    """
    check_int('top', top, 1)
    table = []
    for name, w in biases.items():
        weight, offset = _distribution(
            name, w.detach().double().cpu(), grid, num_prefix_tokens, causal
        )
        centre = torch.einsum('hts,tsd->htd', weight, offset)
        square = torch.einsum('hts,tsd->ht', weight, offset.square()) - centre.square().sum(-1)
        largest = weight.topk(min(top, weight.shape[-1]), dim=-1).values.sum(-1)
        entropy = torch.special.entr(weight).sum(-1) / torch.tensor(2.0).log()
        for head in range(len(weight)):
            table.append(
                {
                    'layer': name,
                    'head': head,
                    f'top_{top}': float(largest[head].mean()),
                    'entropy_bits': float(entropy[head].mean()),
                    **{
                        f'centre_{axis}': float(part)
                        for axis, part in zip(
                            AXES[offset.shape[-1]], centre[head].mean(0), strict=True
                        )
                    },
                    'width': float(square[head].clamp(min=0).sqrt().mean()),
                }
            )
    return table


def _distribution(
    name: str, w: Tensor, grid: Sequence[int] | None, num_prefix_tokens: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """p ``[h, targets, sources]`` and the offsets ``[targets, sources, dims]``."""
    tokens = None if grid is None else num_prefix_tokens + int(torch.Size(grid).numel())
    if grid is not None and w.shape == (1, tokens, tokens):
        w = w[:, num_prefix_tokens:, num_prefix_tokens:]
        place = torch.cartesian_prod(*(torch.arange(size) for size in grid)).view(-1, len(grid))
        later = torch.ones(w.shape[1:], dtype=torch.bool).triu(1)
        w = w.masked_fill(later, -torch.inf) if causal else w
        return w.softmax(-1), (place - place[:, None]).double()
    if not 2 <= w.dim() <= 4:
        raise ValueError(
            f'the position bias of {name} must be [h, *kernel] with 1 to 3 kernel '
            f'dimensions or [1, T, T] of the grid {grid}, got {list(w.shape)}.'
        )
    axes = (torch.arange(size) - size // 2 for size in w.shape[1:])
    offset = torch.cartesian_prod(*axes).view(1, -1, w.dim() - 1)
    return w.flatten(1).softmax(-1)[:, None], offset.double()
