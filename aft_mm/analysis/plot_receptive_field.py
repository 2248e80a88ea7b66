import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from scipy.ndimage import center_of_mass
from torch import Tensor

from aft_mm.checks import check_int, refuse
from aft_mm.errors import DATA_ERRORS, UserError, user_errors
from aft_mm.progress import progress
from aft_mm.visualization import choose
from aft_mm.visualization.figures import new_figure, plain

from . import footer, write_csv
from .networks import (
    Network,
    as_map,
    batches_for,
    layers_of,
    load_network,
    modules_named,
    noise_images,
    record_outputs,
)

FAINTEST = 1e-6  # lower end of the colour scale, relative to the largest pixel


def receptive_field(
    features: Callable[[Tensor], Tensor],
    images: Tensor,
    place: Sequence[int] | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Compute the energy [H, W] of the input gradients of one position of a feature map.

    ``E[y, x] = mean over images of Σ_c Σ_i (∂ f_c[place] / ∂ image_i[y, x])²`` over the channels c
    of the map and i of the image, scaled to a sum of one. It is estimated by a random projection v ~
    N(0, 1) of the channels of each image, ``E (vᵀ J)²``.

    Args:
        features: Function from images [B, C, H, W] to a map [B, D, H', W'] that does not mix
            images.
        images: Normalised images [B, C, H, W].
        place: Row and column in the map; by default the centre ``(H' // 2, W' // 2)``.
    """
    with torch.enable_grad():
        images = images.detach().requires_grad_()
        maps = features(images)
        if not isinstance(maps, Tensor) or maps.dim() != 4 or len(maps) != len(images):
            refuse('features', f'a function that gives a map [{len(images)}, D, H, W]', maps)
        height, width = maps.shape[2:]
        row, column = place or (height // 2, width // 2)
        if not (0 <= row < height and 0 <= column < width):
            refuse('place', f'a row of 0 to {height - 1} and a column of 0 to {width - 1}', place)
        vector = maps[:, :, row, column]
        projection = torch.randn(vector.shape, generator=generator).to(vector)
        (gradient,) = torch.autograd.grad((vector * projection).sum(), images)
    energy = gradient.double().square().sum((0, 1))
    total = energy.sum()
    if not total > 0 or not total.isfinite():
        raise UserError('features must depend on the images, but the gradient is 0 or not finite')
    return (energy / total).cpu()


def energy_within(energy: Tensor, radii: Iterable[float]) -> Tensor:
    distance = _distance(energy)
    return torch.stack([energy[distance <= radius].sum() for radius in radii]) / energy.sum()


def radius_of_share(energy: Tensor, share: float) -> float:
    """Return the smallest radius [px] around the centre of mass with a share of the energy."""
    distance, order = _distance(energy).flatten().sort()
    held = energy.flatten()[order].cumsum(0) / energy.sum()
    # Rounding may leave the total slightly below one.
    return float(distance[(held >= share - 1e-12).nonzero()[0, 0]])


def _distance(energy: Tensor) -> Tensor:
    rows, columns = (
        torch.arange(size, dtype=torch.float64) - middle
        for size, middle in zip(energy.shape, center_of_mass(energy.numpy()), strict=True)
    )
    # Rounding of the centre must not separate pixels at equal distances.
    return torch.hypot(rows[:, None], columns[None]).mul(1e6).round().div(1e6)


def draw_receptive_field(
    fields: Mapping[str, Tensor], title: str = 'Effective receptive field', footer: str = ''
) -> Figure:
    """Draw the energy of each layer, with circles around 50 % (solid) and 90 % (dashed) of it."""
    columns = min(4, len(fields))
    rows = -(-len(fields) // columns)
    figure = new_figure(2.3 * columns + 0.9, 2.6 * rows + 3.1, title, footer)
    grid = figure.add_gridspec(rows + 1, columns, height_ratios=[1.0] * rows + [1.0])
    curve = figure.add_subplot(grid[rows, :])
    axes = []
    for index, (name, energy) in enumerate(fields.items()):
        axis = figure.add_subplot(grid[divmod(index, columns)])
        axes.append(axis)
        image = _draw_energy(axis, name, energy)
        radii = np.linspace(0, float(_distance(energy).max()), 200)
        style: dict[str, Any] = dict(
            color=f'C{index % 10}', linestyle=('-', '--', ':')[index // 10 % 3]
        )
        curve.plot(
            radii, 100 * energy_within(energy, radii), label=plain(name), linewidth=1, **style
        )
    bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.01)
    bar.set_label('energy / largest', fontsize=6)
    bar.ax.tick_params(labelsize=6)
    curve.set_xlabel('radius [px]', fontsize=7)
    curve.set_ylabel('share of the energy [%]', fontsize=7)
    curve.set_ylim(0, 102)
    curve.tick_params(labelsize=6)
    curve.grid(alpha=0.3)
    curve.legend(fontsize=6, ncols=max(1, len(fields) // 6), loc='lower right')
    return figure


def _draw_energy(axis: Axes, name: str, energy: Tensor) -> AxesImage:
    relative = (energy / energy.max()).clamp(min=FAINTEST).numpy()
    image = axis.imshow(
        relative, cmap='cividis', norm=LogNorm(FAINTEST, 1), interpolation='nearest'
    )
    half, most = (radius_of_share(energy, share) for share in (0.5, 0.9))
    centre = center_of_mass(energy.numpy())
    angle = np.linspace(0, 2 * np.pi, 200)
    for radius, style in ((half, '-'), (most, '--')):
        x, y = centre[1] + radius * np.cos(angle), centre[0] + radius * np.sin(angle)
        axis.plot(x, y, style, color='white', linewidth=0.8)
    axis.set_xlim(-0.5, energy.shape[1] - 0.5)
    axis.set_ylim(energy.shape[0] - 0.5, -0.5)
    axis.set_title(
        f'{plain(name)}\nhalf within {half:.3g} px, 90 % within {most:.3g} px', fontsize=6
    )
    axis.tick_params(labelsize=5)
    axis.set_xlabel('column [px]', fontsize=6)
    axis.set_ylabel('row [px]', fontsize=6)
    return image


def run(args: argparse.Namespace) -> None:
    with user_errors(*DATA_ERRORS):
        if args.noise and args.images:
            raise UserError('--noise cannot be combined with images')
        check_int('--num', args.num, 1)
        network = load_network(args.network, args.checkpoint)
        layers = modules_named(network.backbone, names(args.layers, network.backbone))
        noise = args.noise or (network.config is None and not args.images)
        if args.size is not None and not noise:
            raise UserError('--size is that of noise images and needs --noise')
        if args.size is not None:
            check_int('--size', args.size, 1)
        if noise:
            size = None if args.size is None else (args.size, args.size)
            batches = list(noise_images(network, args.num, size).split(1))
        else:
            batches = batches_for(network, args.images, args.num, 1)
        fields = {
            name: mean_field(network, {name: layer}, batches, args.place)
            for name, layer in layers.items()
        }
        inputs = 'noise' if noise else 'images'
        small = f'{footer(args.network, args.checkpoint)} · {len(batches)} {inputs}'
        title = 'Effective receptive field, squared gradients'
        draw_receptive_field(fields, title, small).savefig(args.out, dpi=args.dpi)
        rows = [numbers(name, field, args.radius) for name, field in fields.items()]
        if args.csv:
            write_csv(args.csv, rows)
    for row in rows:
        words = (
            f'{key} {value:.4g}' if isinstance(value, float) else f'\n{value}'
            for key, value in row.items()
        )
        print(', '.join(words), end='')
    print(f'\nwritten to {args.out}')


def names(words: str, backbone: torch.nn.Module) -> list[str]:
    if re.fullmatch(r'all|(first|even):\d+|[\d,]+', words):
        known = layers_of(backbone)
        return [known[index] for index in choose('--layers', words, len(known))]
    return words.split(',')


def mean_field(
    network: Network, layer: dict, batches: list, place: Sequence[int] | None
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)

    def features(images: torch.Tensor) -> torch.Tensor:
        with record_outputs(layer) as outputs:
            network.run(images)
        (output,) = outputs.values()
        return as_map(output, images.shape[2:], network.num_prefix_tokens)

    total = torch.zeros(())
    for batch in progress(batches, 'receptive field'):
        total = total + receptive_field(features, batch, place, generator=generator)
    return total / len(batches)


def numbers(name: str, energy: torch.Tensor, radii: Sequence[float]) -> dict[str, str | float]:
    shares = energy_within(energy, radii)
    return {
        'layer': name,
        **{f'within_{radius:g}_px': float(x) for radius, x in zip(radii, shares, strict=True)},
        'half_px': radius_of_share(energy, 0.5),
        'most_px': radius_of_share(energy, 0.9),
    }
