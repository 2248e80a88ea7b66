"""Draw the keys of images per layer and head, figures 9 to 12 of arXiv 2105.14103.

python tools/analysis_tools/plot_keys.py CONFIG CHECKPOINT --images a.jpg --out keys.png
"""

import argparse
from collections.abc import Sequence

from aft_mm.cli.arguments import (
    add_choice_arguments,
    add_image_arguments,
    add_picture_arguments,
    check_writable,
)
from aft_mm.errors import UserError, user_errors


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', help='path of the config of an image model')
    parser.add_argument('checkpoint', help='path of the checkpoint')
    add_image_arguments(parser, num=1)
    add_choice_arguments(parser)
    add_picture_arguments(parser)
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()  # --help and a wrong argument end before the slow imports

import torch

from aft_mm.apis import (
    build_dataset,
    load_images,
    load_network,
    network_inputs,
    shown_image,
    spread_samples,
)
from aft_mm.cli.arguments import numbered
from aft_mm.cli.pictures import check_picture, footer
from aft_mm.errors import DATA_ERRORS
from aft_mm.visualization import (
    choose,
    draw_key_maps,
    grid_of,
    key_maps,
    mixers_with_keys,
    record_outputs,
)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with user_errors(*DATA_ERRORS):
        check_picture(args)
        network = load_network(args.config, args.checkpoint)
        mixers = list(mixers_with_keys(network.model).values())
        if not mixers:
            raise UserError(f'the model of {args.config} has no token mixer with keys')
        mixers = {f'layer {i}': mixers[i] for i in choose('--layers', args.layers, len(mixers))}
        samples = (
            load_images(network.config, args.images)
            if args.images
            else spread_samples(build_dataset(network.config), args.num)
        )
        paths = numbered(args.out, len(samples))
        check_writable('--out', paths)
        for path, sample in zip(paths, samples, strict=True):
            inputs = network_inputs(network.config, [sample])
            maps = keys_of(network, mixers, inputs)
            draw_key_maps(
                shown_image(network.config, sample),
                maps,
                args.heads,
                footer(args.config, args.checkpoint),
            ).savefig(path, dpi=args.dpi)
    print('written to ' + ', '.join(paths))


def keys_of(network, mixers: dict, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """The key maps [h, H, W] of one image [1, C, H', W'] per layer."""
    with record_outputs({name: mixer.key for name, mixer in mixers.items()}) as keys:
        with torch.no_grad():
            network.run(inputs)
    prefix = network.num_prefix_tokens
    maps = {}
    for name, key in keys.items():
        grid = grid_of(key.shape[1] - prefix, inputs.shape[2:])
        if grid is None:
            raise UserError(
                f'the {key.shape[1]} tokens of {name} do not lie on a grid over images '
                f'of {tuple(inputs.shape[2:])} pixels'
            )
        maps[name] = key_maps(key[0], grid, prefix)
    return maps


if __name__ == '__main__':
    main()
