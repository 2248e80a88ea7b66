import argparse
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor

from aft_mm.checks import check_int
from aft_mm.errors import DATA_ERRORS, UserError, user_errors
from aft_mm.layers import SoftmaxAttention
from aft_mm.progress import progress
from aft_mm.visualization import choose
from aft_mm.visualization.figures import MOST_PANELS, Choice, new_figure

from . import footer, write_csv
from .networks import batches_for, by_layer, grid_of, load_network, noise_images, record_attention


def mean_relative_attention(attention: Tensor, grid: Sequence[int]) -> Tensor:
    """Average attention ``[h, T, T]`` by offset to the source: ``[h, 2H − 1, 2W − 1]``.

    The mean is over queries of the grid. As in the paper, prefix tokens are dropped.
    """
    height, width = grid
    shape = (2 * height - 1, 2 * width - 1)
    y, x = np.divmod(np.arange(height * width), width)
    offsets = y - y[:, None] + height - 1, x - x[:, None] + width - 1
    places = torch.from_numpy(np.ravel_multi_index(offsets, shape)).flatten()
    total = torch.zeros(len(attention), shape[0] * shape[1], dtype=torch.float64)
    total.index_add_(1, places, attention.flatten(1).double().cpu())
    return total.unflatten(1, shape) / query_counts(shape)


def draw_relative_attention(
    attention: Mapping[str, Tensor], heads: Choice = 'even:12', footer: str = ''
) -> Figure:
    """Draw the maps of :func:`mean_relative_attention`, one row per layer, one column per head."""
    chosen = choose('heads', heads, min(map(len, attention.values())), MOST_PANELS)
    title = 'Mean relative attention; one colour scale per panel, 0 to its maximum'
    figure = new_figure(1.25 * len(chosen) + 0.6, 1.6 * len(attention) + 0.7, title, footer)
    axes = figure.subplots(len(attention), len(chosen), squeeze=False)
    for row, (name, maps) in zip(axes, attention.items(), strict=True):
        for axis, head in zip(row, chosen, strict=True):
            values = maps[head].numpy()
            reach_y, reach_x = values.shape[0] / 2, values.shape[1] / 2
            most = float(values.max())
            style = dict(cmap='cividis', norm=Normalize(0, most), interpolation='nearest')
            axis.imshow(values, extent=(-reach_x, reach_x, reach_y, -reach_y), **style)
            axis.set_title(f'head {head}, max {100 * most:.2g} %', fontsize=6)
            axis.set_xlabel('column offset', fontsize=6)
            axis.tick_params(labelsize=5)
            axis.locator_params(integer=True)
        row[0].set_ylabel(f'{name}\nrow offset', fontsize=7)
    return figure


def query_counts(shape: Sequence[int]) -> Tensor:
    rows, columns = (size // 2 + 1 - (torch.arange(size) - size // 2).abs() for size in shape)
    return rows[:, None] * columns


def offset_share(relative: Tensor, squares: Tensor) -> Tensor:
    """Return the share [h] of the variance of attention that a function of the offset explains.

    Args:
        relative: :func:`mean_relative_attention` [h, 2H − 1, 2W − 1].
        squares: Mean square [h] of the attention between tokens of the grid.
    """
    weight = query_counts(relative.shape[1:]) / query_counts(relative.shape[1:]).sum()
    mean = (weight * relative).sum((1, 2))
    explained = (weight * relative.square()).sum((1, 2)) - mean.square()
    return explained / (squares - mean.square())


class MeanAttention:
    """Mean attention of each layer over batches; ``take`` is called for each layer in order.

    `blocks` are the numbers of these layers, by default from 0.
    """

    def __init__(
        self, image_size: Sequence[int], num_prefix_tokens: int, blocks: Sequence[int] = ()
    ) -> None:
        self.blocks = blocks
        self.image_size, self.num_prefix_tokens = tuple(image_size), num_prefix_tokens
        self.sums: list[Tensor] = []  # [h, T, T] per layer
        self.squares: list[Tensor] = []  # [h] per layer
        self.grid: tuple[int, int] = (0, 0)
        self.layer = self.batch = self.images = 0

    def take(self, attention: Tensor) -> None:
        tokens = attention.shape[-1] - self.num_prefix_tokens
        grid = grid_of(tokens, self.image_size)
        if grid is None or len(attention) != self.batch:
            raise UserError(
                f'attention must be over {self.batch} whole images of {self.image_size} pixels, '
                f'got {len(attention)} x {tokens} tokens'
            )
        self.grid = grid
        inner = attention[..., self.num_prefix_tokens :, self.num_prefix_tokens :]
        if self.layer == len(self.sums):
            self.sums.append(torch.zeros_like(inner[0], dtype=torch.float64))
            self.squares.append(self.sums[-1].new_zeros(inner.shape[1]))
        self.sums[self.layer] += inner.sum(0, dtype=torch.float64)
        self.squares[self.layer] += inner.square().mean((2, 3), dtype=torch.float64).sum(0)
        self.layer += 1

    def next_batch(self, size: int) -> None:
        self.batch = size
        self.images += size
        self.layer = 0

    def numbers(self) -> list[int]:
        return list(self.blocks or range(len(self.sums)))

    def means(self) -> dict[str, Tensor]:
        return {
            f'layer {i}': mean_relative_attention(total / self.images, self.grid)
            for i, total in zip(self.numbers(), self.sums, strict=True)
        }

    def offset_shares(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return :func:`offset_share` of the mean over images, and of the single images, by layer.

        The variance of the mean is without that of the sample.
        """
        shares = {}
        for (name, relative), total, squares in zip(
            self.means().items(), self.sums, self.squares, strict=True
        ):
            of_images = squares.cpu() / self.images
            of_mean = (total / self.images).square().mean((1, 2)).cpu()
            if self.images > 1:
                of_mean = (self.images * of_mean - of_images) / (self.images - 1)
            shares[name] = offset_share(relative, of_mean), offset_share(relative, of_images)
        return shares


def mean_attention_distance(relative: Tensor) -> np.ndarray:
    """Return the attention-weighted mean distance [tokens] of the sources per head.

    ``Σ n a |offset| / Σ n a`` for the attention a at an offset and the number n of its queries.
    """
    rows, columns = (torch.arange(size) - size // 2 for size in relative.shape[1:])
    distance = torch.hypot(rows[:, None].double(), columns[None].double())
    read = relative * query_counts(relative.shape[1:])
    return ((read * distance).sum((1, 2)) / read.sum((1, 2))).numpy()


def shuffle_patches(images: Tensor, patch: int, seed: int) -> Tensor:
    """Permute the squares of `patch` pixels of images [B, C, H, W], each image in its own way."""
    check_int('--shuffle', patch, 1)
    size = images.shape[2:]
    if size[0] % patch or size[1] % patch:
        raise UserError(f'--shuffle must divide images of {tuple(size)} pixels, got {patch}')
    patches = F.unfold(images, patch, stride=patch)
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(len(images), patches.shape[2], generator=generator).argsort(1)
    patches = patches.gather(2, order[:, None].expand_as(patches))
    return F.fold(patches, size, patch, stride=patch)


def run(args: argparse.Namespace) -> None:
    with user_errors(*DATA_ERRORS):
        if args.noise and args.images:
            raise UserError('--noise cannot be combined with images')
        check_int('--batch-size', args.batch_size, 1)
        check_int('--num', args.num, 1)
        network = load_network(args.network, args.checkpoint)
        if args.noise:
            batches = list(noise_images(network, args.num).split(args.batch_size))
        else:
            batches = batches_for(network, args.images, args.num, args.batch_size)
        inputs = 'noise images' if args.noise else 'images'
        if args.shuffle is not None:
            batches = [shuffle_patches(batch, args.shuffle, i) for i, batch in enumerate(batches)]
            inputs += f' with shuffled squares of {args.shuffle} px'
        attending = {
            name: module
            for name, module in network.model.named_modules()
            if isinstance(module, SoftmaxAttention)
        }
        mean = MeanAttention(
            batches[0].shape[2:], network.num_prefix_tokens, list(by_layer(attending))
        )
        with torch.no_grad(), record_attention(mean.take, attending.values()):
            for batch in progress(batches, 'attention'):
                mean.next_batch(len(batch))
                network.run(batch)
        layers = mean.means()
        if not layers:
            raise UserError(
                f"{args.network} has no layer that calls torch's scaled_dot_product_attention"
            )
        wanted = choose('--layers', args.layers, mean.numbers())
        chosen = {name: layers[name] for name in (f'layer {i}' for i in wanted)}
        small = f'{footer(args.network, args.checkpoint)} · {mean.images} {inputs}'
        figure = draw_relative_attention(chosen, args.heads, small)
        figure.savefig(args.out, dpi=args.dpi)
        if args.csv:
            shares = mean.offset_shares()
            columns = {
                name: (mean_attention_distance(maps), *shares[name])
                for name, maps in chosen.items()
            }
            rows = [
                dict(
                    layer=name,
                    head=head,
                    distance_tokens=float(distance),
                    offset_share=float(of_mean),
                    offset_share_of_images=float(of_images),
                )
                for name, column in columns.items()
                for head, (distance, of_mean, of_images) in enumerate(zip(*column, strict=True))
            ]
            write_csv(args.csv, rows)
    print(
        f'\nplotted {len(chosen)} of {len(layers)} layers over {mean.images} {inputs} to {args.out}'
    )
