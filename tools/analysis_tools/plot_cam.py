"""Draw class activation maps of a classifier by the library grad-cam, aft_mm[analysis].

python tools/analysis_tools/plot_cam.py CONFIG CHECKPOINT --images a.jpg b.jpg --out cam.png
"""

import argparse
from collections.abc import Sequence

from aft_mm.cli.arguments import add_image_arguments, add_picture_arguments
from aft_mm.errors import UserError, user_errors

METHODS = ('GradCAM', 'GradCAMPlusPlus', 'HiResCAM', 'XGradCAM', 'LayerCAM', 'EigenGradCAM')


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', help="path of the config of a classifier, or mmpretrain's name")
    parser.add_argument('checkpoint', help='path of the checkpoint')
    add_image_arguments(parser, num=6)
    parser.add_argument('--category', type=int, help='number of a class; else the predicted one')
    parser.add_argument(
        '--layer',
        help="a part of the backbone; else, as in mmpretrain's vis_cam.py, the last "
        'norm, or with a class token that before the last mixing of tokens',
    )
    parser.add_argument('--method', choices=METHODS, default='GradCAM')
    add_picture_arguments(parser)
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()  # --help and a wrong argument end before the slow imports

import numpy as np
import torch
from mmengine.utils.dl_utils import is_norm

from aft_mm.apis import (
    Network,
    build_dataset,
    class_names,
    load_images,
    load_network,
    modules_named,
    network_inputs,
    shown_image,
    spread_samples,
)
from aft_mm.cli.pictures import check_picture, footer, save
from aft_mm.errors import DATA_ERRORS
from aft_mm.visualization import as_map, draw_cams


def target_layer(network: Network) -> str:
    """The last norm after which tokens still reach the classifier.

    Raises:
        UserError: the backbone has no norm.
    """
    norms = [name for name, part in network.backbone.named_modules() if is_norm(part)]
    if len(norms) < 3:
        raise UserError(f'{type(network.backbone).__name__} has too few norms: give --layer')
    # After the last mixer only the class token is read: its own norm and that of the MLP follow.
    return norms[-3 if network.num_prefix_tokens else -1]


def activation_maps(
    network: Network,
    layer: torch.nn.Module,
    inputs: torch.Tensor,
    categories: Sequence[int],
    method: str = 'GradCAM',
) -> np.ndarray:
    """Maps [B, H, W] from 0 to 1 of images [B, C, H, W] for a class each.

    Raises:
        UserError: grad-cam is not installed.
    """
    try:
        import pytorch_grad_cam
        from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
    except ImportError as error:
        raise UserError(
            'class activation maps need grad-cam: pip install aft_mm[analysis]'
        ) from error

    def reshape(tokens: torch.Tensor) -> torch.Tensor:
        return as_map(tokens, inputs.shape[2:], network.num_prefix_tokens)

    network.model.requires_grad_(True)
    cam_of = getattr(pytorch_grad_cam, method)
    with cam_of(network.model, [layer], reshape_transform=reshape) as cam:
        return cam(inputs, [ClassifierOutputTarget(category) for category in categories])


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with user_errors(*DATA_ERRORS):
        check_picture(args)
        network = load_network(args.config, args.checkpoint)
        if network.config is None or not hasattr(network.model, 'head'):
            raise UserError(f'{args.config} is no classifier of mmpretrain')
        name = args.layer or target_layer(network)
        layer = modules_named(network.backbone, [name])[name]
        dataset = None if args.images else build_dataset(network.config)
        samples = (
            load_images(network.config, args.images)
            if args.images
            else spread_samples(dataset, args.num)
        )
        inputs = network_inputs(network.config, samples)
        with torch.no_grad():
            probabilities = network.model(inputs).softmax(1)
        count = probabilities.shape[1]
        if args.category is not None and not 0 <= args.category < count:
            raise UserError(f'--category must be 0 to {count - 1}, got {args.category}')
        categories = (
            probabilities.argmax(1)
            if args.category is None
            else torch.full((len(inputs),), args.category)
        )
        cams = activation_maps(network, layer, inputs, categories.tolist(), args.method)
        names = class_names(dataset, count)
        titles = [
            f'{names[category]}, p = {float(row[category]):.2f}'
            for row, category in zip(probabilities, categories.tolist(), strict=True)
        ]
        save(
            draw_cams(
                [shown_image(network.config, sample) for sample in samples],
                cams,
                titles,
                f'{footer(args.config, args.checkpoint)} · {args.method} at {name}',
            ),
            args,
        )
    print(f'{args.method} at {name} of {len(cams)} images drawn to {args.out}')


if __name__ == '__main__':
    main()
