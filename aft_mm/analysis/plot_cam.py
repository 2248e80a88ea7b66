import argparse
from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.figure import Figure
from mmengine.utils.dl_utils import is_norm

from aft_mm.apis.images import probabilities
from aft_mm.config.finding import install_command
from aft_mm.errors import DATA_ERRORS, UserError, user_errors
from aft_mm.visualization.figures import new_figure, plain

from . import footer
from .networks import (
    Network,
    as_map,
    build_dataset,
    class_names,
    load_classifier,
    load_images,
    modules_named,
    network_inputs,
    shown_image,
    spread_samples,
)


def draw_cams(
    images: Sequence[np.ndarray],
    cams: np.ndarray | Sequence[np.ndarray],
    titles: Sequence[str],
    footer: str = '',
) -> Figure:
    pairs = min(3, len(images))
    rows = -(-len(images) // pairs)
    figure = new_figure(3.4 * pairs + 0.8, 2.1 * rows + 0.7, 'Class activation maps', footer)
    axes = figure.subplots(rows, 2 * pairs, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for pair, image, cam, title in zip(axes.reshape(-1, 2), images, cams, titles, strict=False):
        pair[0].imshow(image)
        pair[0].set_title(plain(title), fontsize=7)
        pair[1].imshow(image.mean(-1), cmap='gray', vmin=0, vmax=255)
        picture = pair[1].imshow(cam, cmap='inferno', vmin=0, vmax=1, alpha=0.6)
    bar = figure.colorbar(picture, ax=axes, fraction=0.03, pad=0.01)
    bar.set_label('activation / largest', fontsize=6)
    bar.ax.tick_params(labelsize=6)
    return figure


def target_layer(network: Network) -> str:
    """Return the name of the last norm whose tokens all influence the output."""
    norms = [name for name, part in network.backbone.named_modules() if is_norm(part)]
    if len(norms) < 3:
        raise UserError(
            f'--layer must be given for {type(network.backbone).__name__} without norms'
        )
    # After the last mixer only the class token matters.
    return norms[-3 if network.num_prefix_tokens else -1]


def activation_maps(
    network: Network,
    layer: torch.nn.Module,
    inputs: torch.Tensor,
    categories: Sequence[int],
    method: str = 'GradCAM',
) -> np.ndarray:
    try:
        import pytorch_grad_cam
        from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
    except ImportError as error:
        raise UserError(
            f'class activation maps need grad-cam: {install_command("analysis")}'
        ) from error

    def reshape(tokens: torch.Tensor) -> torch.Tensor:
        return as_map(tokens, inputs.shape[2:], network.num_prefix_tokens)

    outputs = []
    with torch.no_grad(), layer.register_forward_hook(lambda *args: outputs.append(args[-1])):
        network.run(inputs[:1])
    if not all(isinstance(output, torch.Tensor) for output in outputs):
        raise UserError(f'--layer must return one tensor, got {type(outputs[0]).__name__}')
    network.model.requires_grad_(True)
    cam_of = getattr(pytorch_grad_cam, method)
    with cam_of(network.model, [layer], reshape_transform=reshape) as cam:
        return cam(inputs, [ClassifierOutputTarget(category) for category in categories])


def run(args: argparse.Namespace) -> None:
    with user_errors(*DATA_ERRORS):
        network = load_classifier(args.network, args.checkpoint)
        name = args.layer or target_layer(network)
        layer = modules_named(network.backbone, [name])[name]
        if args.images:
            dataset, samples = None, load_images(network.config, args.images)
        else:
            dataset = build_dataset(network.config)
            samples = spread_samples(dataset, args.num)
        inputs = network_inputs(network.model, samples)
        with torch.no_grad():
            scores = probabilities(network.model, network.model(inputs))
        count = scores.shape[1]
        if args.category is not None and not 0 <= args.category < count:
            raise UserError(f'--category must be 0 to {count - 1}, got {args.category}')
        categories = scores.argmax(1).tolist()
        if args.category is not None:
            categories = [args.category] * len(inputs)
        cams = activation_maps(network, layer, inputs, categories, args.method)
        names = class_names(dataset, count, network.model)
        titles = [
            f'{names[category]}, p = {float(row[category]):.2f}'
            for row, category in zip(scores, categories, strict=True)
        ]
        images = [shown_image(network.config, sample) for sample in samples]
        small = f'{footer(args.network, args.checkpoint)} · {args.method} at {name}'
        draw_cams(images, cams, titles, small).savefig(args.out, dpi=args.dpi)
    print(f'plotted {args.method} at {name} for {len(cams)} images to {args.out}')
