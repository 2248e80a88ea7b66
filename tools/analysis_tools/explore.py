"""Write one HTML page to explore the position biases of a checkpoint, and its keys of images.

    python tools/analysis_tools/explore.py CONFIG CHECKPOINT a.jpg b.jpg --out page.html

A browser opens it from disk; it loads nothing.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from aft_mm.cli.arguments import check_output
from aft_mm.errors import UserError, user_errors


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', help='path of the config')
    parser.add_argument('checkpoint', help='path of the checkpoint, as tools/train.py writes it')
    parser.add_argument('images', nargs='*', help='image files whose keys are shown; a classifier')
    parser.add_argument('--out', required=True, metavar='HTML', help='where the page goes')
    return parser.parse_intermixed_args(argv)


if __name__ == '__main__':
    parse_args()  # --help and a wrong argument end before the slow imports

from mmengine.config import Config
from torch import nn

from aft_mm.apis import ImageClassifier, load_model
from aft_mm.cli.pictures import footer
from aft_mm.config.reading import read_config
from aft_mm.errors import CONFIG_ERRORS
from aft_mm.visualization import (
    ExplorerImage,
    ExplorerLayer,
    explorer_page,
    mixers_with_bias,
    mixers_with_keys,
    record_outputs,
)


def layers_of(mixers: dict[str, nn.Module], config: Config) -> list[ExplorerLayer]:
    """The biases of the mixers.

    Raises:
        UserError: there are none, or they are not on one grid of two dimensions.
    """
    if not mixers:
        raise UserError(f'the model of {config.filename} has no token mixer with a position bias')
    grids = {mixer.grid for mixer in mixers.values()}
    if len(grids) > 1 or len(next(iter(grids)) or ()) != 2:
        raise UserError(
            'explore.py shows biases on one grid of two dimensions, but the tokens of '
            f'{config.filename} are on {grids}; plot_position_bias.py draws those'
        )
    return [
        ExplorerLayer(
            name, mixer.position_bias(), mixer.causal, getattr(mixer, 'global_connectivity', True)
        )
        for name, mixer in mixers.items()
    ]


def look_at(classifier: ImageClassifier, path: str, mixers: dict[str, nn.Module]) -> ExplorerImage:
    """An image as the model sees it, with the keys of each mixer.

    Raises:
        UserError: it is no image, or has another grid of tokens than the biases.
    """
    inputs = classifier.preprocess(path)['inputs']
    mixer = next(iter(mixers.values()))
    grid = classifier.model.backbone.patch_embed.grid_of(*inputs.shape[1:])
    if grid != mixer.grid:
        raise UserError(
            f'image {path!r} has a grid of {grid} tokens in the model, but the biases '
            f'are of {mixer.grid}; give one of another size'
        )
    projections = {
        name: mixers[name].key for name in mixers_with_keys(classifier.model) if name in mixers
    }
    with record_outputs(projections) as keys:
        (result,) = classifier(path, progress=False)
    pixels = inputs.permute(1, 2, 0).numpy()
    if pixels.shape[2] == 1:
        pixels = pixels.repeat(3, axis=2)
    elif classifier.takes_bgr:
        pixels = pixels[..., ::-1]
    what = result['label'] if result['class_name'] is None else result['class_name']
    return ExplorerImage(
        f'{Path(path).name}: {what}, score {result["score"]:.2f}',
        pixels.copy(),
        [keys[name][0] if name in keys else None for name in mixers],
    )


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)

    with user_errors(*CONFIG_ERRORS):
        check_output('--out', args.out, ('.html',))
        config = read_config(args.config)
        if args.images:
            classifier = ImageClassifier(config, args.checkpoint, 'cpu')
            model = classifier.model
        else:
            _, model = load_model(config, args.checkpoint, 'cpu')
        mixers = mixers_with_bias(model)
        layers = layers_of(mixers, config)
        images = [look_at(classifier, path, mixers) for path in args.images]
        mixer = next(iter(mixers.values()))
        about = (
            f'{type(mixer).__name__}, {len(layers)} layers · {footer(args.config, args.checkpoint)}'
        )
        page = explorer_page(
            layers,
            mixer.grid,
            mixer.num_prefix_tokens,
            images,
            title=Path(args.config).stem,
            about=about,
        )
        Path(args.out).write_text(page, encoding='utf-8')
    print(
        f'{len(layers)} layers and {len(images)} images written to {args.out}, '
        f'{len(page.encode()) / 1e6:.1f} MB'
    )


if __name__ == '__main__':
    main()
