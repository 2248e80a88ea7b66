"""Draw effective receptive fields: the energy of the gradients of a place towards the pixels.

Without a checkpoint the weights of NETWORK are random; where it has no data set and no images are
given, the input is noise.

    python tools/analysis_tools/plot_receptive_field.py CONFIG CHECKPOINT --num 64 --out field.png
    python tools/analysis_tools/plot_receptive_field.py timm:resnet18 --size 224 --out field.png
"""

import argparse
import re
from collections.abc import Sequence

from aft_mm.cli.arguments import LAYERS, add_choice_arguments, add_network_arguments
from aft_mm.errors import user_errors


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_network_arguments(parser, num=16, random=True)
    add_choice_arguments(
        parser,
        heads=False,
        layers=f'{LAYERS}, or names of parts of the backbone with commas between them',
    )
    parser.add_argument('--size', type=int, help='edge of the noise [px]')
    parser.add_argument(
        '--place',
        type=int,
        nargs=2,
        metavar=('ROW', 'COLUMN'),
        help='of the map of a layer; the middle unless given',
    )
    parser.add_argument(
        '--radius',
        type=float,
        nargs='+',
        default=[16, 32, 64],
        help='print the share of the energy within these radii [px]',
    )
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()  # --help and a wrong argument end before the slow imports

import torch

from aft_mm.apis import batches_for, layers_of, load_network, modules_named, noise_images
from aft_mm.checks import check_int
from aft_mm.cli.pictures import check_picture, footer, save, write_csv
from aft_mm.cli.progress import progress
from aft_mm.errors import DATA_ERRORS
from aft_mm.visualization import (
    as_map,
    choose,
    draw_receptive_field,
    energy_within,
    radius_of_share,
    receptive_field,
    record_outputs,
)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with user_errors(*DATA_ERRORS):
        check_picture(args)
        check_int('--num', args.num, 1)
        network = load_network(args.config, args.checkpoint)
        layers = modules_named(network.backbone, names(args.layers, network.backbone))
        noise = args.noise or (network.config is None and not args.images)
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
        save(
            draw_receptive_field(
                fields,
                'Effective receptive field, squared gradients',
                f'{footer(args.config, args.checkpoint)} · {len(batches)} {inputs}',
            ),
            args,
        )
        rows = [numbers(name, field, args.radius) for name, field in fields.items()]
        if args.csv:
            write_csv(args.csv, rows)
    for row in rows:
        print(
            ', '.join(
                f'{key} {value:.4g}' if isinstance(value, float) else f'\n{value}'
                for key, value in row.items()
            ),
            end='',
        )
    print(f'\ndrawn to {args.out}')


def names(words: str, backbone: torch.nn.Module) -> list[str]:
    """The names of the layers that ``--layers`` means."""
    if re.fullmatch(r'all|(first|even):\d+|[\d,]+', words):
        known = layers_of(backbone)
        return [known[index] for index in choose('--layers', words, len(known))]
    return words.split(',')


def mean_field(network, layer: dict, batches: list, place: Sequence[int] | None) -> torch.Tensor:
    """The field of one layer, the mean over the batches."""
    generator = torch.Generator().manual_seed(0)

    def features(images: torch.Tensor) -> torch.Tensor:
        with record_outputs(layer) as outputs:
            network.run(images)
        (output,) = outputs.values()
        return as_map(output, images.shape[2:], network.num_prefix_tokens)

    total = 0
    for batch in progress(batches, 'receptive field'):
        total = total + receptive_field(features, batch, place, generator=generator)
    return total / len(batches)


def numbers(name: str, energy: torch.Tensor, radii: Sequence[float]) -> dict[str, str | float]:
    """What a table says of a layer."""
    shares = energy_within(energy, radii)
    return {
        'layer': name,
        **{
            f'within_{radius:g}_px': float(share)
            for radius, share in zip(radii, shares, strict=True)
        },
        'half_px': radius_of_share(energy, 0.5),
        'most_px': radius_of_share(energy, 0.9),
    }


if __name__ == '__main__':
    main()
