import argparse
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from aft_mm.apis import load_model
from aft_mm.checks import check_int
from aft_mm.errors import CONFIG_ERRORS, UserError, user_errors
from aft_mm.visualization import choose, draw_position_bias, mixers_with_bias

from . import footer, write_csv
from .networks import by_layer

AXES = {1: ('offset',), 2: ('row', 'column'), 3: ('depth', 'row', 'column')}


def position_bias_table(
    biases: Mapping[str, Tensor],
    grid: Sequence[int] | None = None,
    num_prefix_tokens: int = 0,
    causal: bool = False,
    top: int = 5,
) -> list[dict[str, str | int | float]]:
    """Compute statistics of ``p = exp(w) / Σ exp(w)``, one row (dict) per layer and head.

    - ``top_N``: share of the N = ``top`` largest positions in p
    - ``entropy_bits``: −Σ p log₂ p; the regulariser of equation 9 is its sum in nats
    - ``centre_row``, …: Σ p · offset, source − target, in tokens
    - ``width``: √(Σ p (offset − centre)²) in tokens, over all dimensions

    For ``[1, T, T]``, the statistics are means over the targets on the grid, without prefix tokens
    and, if ``causal``, later ones.
    """
    check_int('top', top, 1)
    table = []
    for name, w in biases.items():
        w = w.detach().double().cpu()
        weight, offset = _distribution(w, grid, num_prefix_tokens, causal)
        centre = torch.einsum('hts,tsd->htd', weight, offset)
        square = torch.einsum('hts,tsd->ht', weight, offset.square()) - centre.square().sum(-1)
        largest = weight.topk(min(top, weight.shape[-1]), dim=-1).values.sum(-1)
        entropy = torch.special.entr(weight).sum(-1) / torch.tensor(2.0).log()
        for head in range(len(weight)):
            row: dict[str, str | int | float] = {
                'layer': name,
                'head': head,
                f'top_{top}': float(largest[head].mean()),
            }
            row['entropy_bits'] = float(entropy[head].mean())
            for axis, part in zip(AXES[offset.shape[-1]], centre[head].mean(0), strict=True):
                row[f'centre_{axis}'] = float(part)
            row['width'] = float(square[head].clamp(min=0).sqrt().mean())
            table.append(row)
    return table


def _distribution(
    w: Tensor, grid: Sequence[int] | None, num_prefix_tokens: int, causal: bool
) -> tuple[Tensor, Tensor]:
    tokens = None if grid is None else num_prefix_tokens + int(torch.Size(grid).numel())
    if grid is not None and w.shape == (1, tokens, tokens):
        w = w[:, num_prefix_tokens:, num_prefix_tokens:]
        position = torch.cartesian_prod(*(torch.arange(size) for size in grid)).view(-1, len(grid))
        later = torch.ones(w.shape[1:], dtype=torch.bool).triu(1)
        w = w.masked_fill(later, -torch.inf) if causal else w
        return w.softmax(-1), (position - position[:, None]).double()
    axes = (torch.arange(size) - size // 2 for size in w.shape[1:])
    offset = torch.cartesian_prod(*axes).view(1, -1, w.dim() - 1)
    w = w.flatten(1)
    if causal:  # in raster order, offsets to later tokens follow the centre
        w, offset = w[:, : w.shape[1] // 2 + 1], offset[:, : w.shape[1] // 2 + 1]
    return w.softmax(-1)[:, None], offset.double()


def run(args: argparse.Namespace) -> None:
    with user_errors(*CONFIG_ERRORS):
        check_int('--top', args.top, 1)
        _, model = load_model(args.config, args.checkpoint, device='cpu')
        mixers = by_layer(mixers_with_bias(model))
        if not mixers:
            raise UserError(f'the model of {args.config} has no token mixer with a position bias')
        biases = {
            f'layer {i}': mixers[i].position_bias()
            for i in choose('--layers', args.layers, list(mixers))
        }
        mixer = next(iter(mixers.values()))
        layout = {key: getattr(mixer, key) for key in ('grid', 'num_prefix_tokens', 'causal')}
        w = next(iter(biases.values()))
        heads = len(choose('--heads', args.heads, len(w)))
        names = ('heads', 'queries', 'view', 'quantity', 'scale')
        choices = {name: getattr(args, name) for name in names}
        small = footer(args.config, args.checkpoint)
        figure = draw_position_bias(biases, **layout, **choices, footer=small)
        figure.savefig(args.out, dpi=args.dpi)
        if args.csv:
            table = position_bias_table(biases, **layout, top=args.top)
            write_csv(args.csv, table)
    omitted = f' ({heads} of {len(w)} heads)' if heads < len(w) else ''
    print(f'plotted {len(biases)} of {len(mixers)} layers{omitted} to {args.out}')
