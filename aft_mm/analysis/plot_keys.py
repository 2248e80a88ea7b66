import argparse
from collections.abc import Mapping

import numpy as np
import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor

from aft_mm.errors import DATA_ERRORS, UserError, user_errors
from aft_mm.layers import QueryPooling
from aft_mm.outputs import check_writable, numbered
from aft_mm.visualization import choose
from aft_mm.visualization.figures import MOST_PANELS, Choice, new_figure

from . import footer
from .networks import (
    Network,
    by_layer,
    grid_of,
    load_network,
    mixers_with_keys,
    network_inputs,
    record_outputs,
    samples_for,
    shown_image,
)


def key_maps(key: Tensor, grid: tuple[int, int], num_prefix_tokens: int = 0) -> Tensor:
    """Return ``e^k`` over its mean on the grid, keys [T, h] to maps [h, H, W]."""
    inner = key[num_prefix_tokens:]
    return (inner.double().softmax(0) * len(inner)).T.unflatten(1, grid)


def draw_key_maps(
    image: np.ndarray, keys: Mapping[str, Tensor], heads: Choice = 'even:12', footer: str = ''
) -> Figure:
    """Draw an image and the maps of :func:`key_maps`, one row per layer, one column per head."""
    chosen = choose('heads', heads, max(map(len, keys.values())), MOST_PANELS)
    title = 'Keys: exp(k) over its mean on the image; one colour scale per layer'
    size = 1.15 * (len(chosen) + 1) + 1.2, 1.4 * len(keys) + 0.7
    figure = new_figure(*size, title, footer)
    axes = figure.subplots(len(keys), len(chosen) + 1, squeeze=False)
    for row, (name, maps) in zip(axes, keys.items(), strict=True):
        own = [head for head in chosen if head < len(maps)] or [0]
        chosen_maps = maps[own].detach().cpu().numpy()
        # The scale is symmetric around 1 and has a minimum range.
        most = min(1e4, max(1.01, chosen_maps.max(), 1 / max(1e-4, chosen_maps.min())))
        norm = LogNorm(1 / most, most)
        row[0].imshow(image)
        row[0].set_title('image', fontsize=7)
        row[0].set_ylabel(name, fontsize=7)
        for axis in row[1 + len(own) :]:
            axis.set_visible(False)
        for axis, head, values in zip(row[1:], own, chosen_maps, strict=False):
            picture = axis.imshow(values, cmap='RdBu_r', norm=norm, interpolation='nearest')
            axis.set_title(f'head {head}', fontsize=7)
        for axis in row:
            axis.set_xticks([])
            axis.set_yticks([])
        bar = figure.colorbar(picture, ax=list(row), fraction=0.04, pad=0.01)
        ticks = [1 / most, 1, most]
        bar.set_ticks(ticks, labels=[f'{ratio:.3g}' for ratio in ticks])
        bar.ax.minorticks_off()
        bar.ax.tick_params(labelsize=6)
        bar.set_label('exp(k) / mean', fontsize=6)
    return figure


def run(args: argparse.Namespace) -> None:
    with user_errors(*DATA_ERRORS):
        network = load_network(args.network, args.checkpoint)
        every = by_layer(mixers_with_keys(network.model))
        if not every:
            raise UserError(f'the model of {args.network} has no token mixer with keys')
        mixers = {f'layer {i}': every[i] for i in choose('--layers', args.layers, list(every))}
        for module in network.model.modules():
            if isinstance(module, QueryPooling):
                mixers['pooling'] = module
        samples = samples_for(network.config, args.images, args.num)
        paths = numbered(args.out, len(samples))
        check_writable('--out', paths, args.images)
        for path, sample in zip(paths, samples, strict=True):
            maps = keys_of(network, mixers, network_inputs(network.model, [sample]))
            image, small = (
                shown_image(network.config, sample),
                footer(args.network, args.checkpoint),
            )
            draw_key_maps(image, maps, args.heads, small).savefig(path, dpi=args.dpi)
    print('written to ' + ', '.join(paths))


def keys_of(network: Network, mixers: dict, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    with record_outputs({name: mixer.key for name, mixer in mixers.items()}) as keys:
        with torch.no_grad():
            network.run(inputs)
    maps = {}
    for name, key in keys.items():
        prefix = 0 if name == 'pooling' else network.num_prefix_tokens
        grid = grid_of(key.shape[1] - prefix, inputs.shape[2:])
        if grid is None:
            raise UserError(
                f'the tokens of {name} must form a grid over images of '
                f'{tuple(inputs.shape[2:])} pixels, got {key.shape[1]}'
            )
        maps[name] = key_maps(key[0], grid, prefix)
    return maps
