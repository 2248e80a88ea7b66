"""Export a trained classifier or its backbone: OUT.onnx for ONNX (opset 18), OUT.pt2 for torch.

The input of the graph is `image` [B, C, H, W], normalised like the data_preprocessor of the config
but without mask channel. The output is `scores` before the softmax, or with --backbone a map
[B, D, H', W'] per entry of out_indices. With --dynamic, B is arbitrary, and H and W are at least
one patch plus one pixel.

AFT chooses among several forms of its sums depending on the values of keys and biases, which a
graph cannot do. The exported form depends on the position biases of the checkpoint only and is
valid for keys of any range, and hence for any image. A slower form is used for biases with a range
above 60 nats and for windows without global connectivity. The exported file is compared with the
model on other images, with --dynamic also of other sizes.
"""

import argparse
import importlib.util
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from aft_mm.cli.arguments import check_writable, tool_parser
from aft_mm.errors import UserError, user_errors


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument('config', help='path of the config')
    parser.add_argument('checkpoint', help='path of a checkpoint written by tools/train.py')
    parser.add_argument('out', metavar='OUT', type=Path, help='OUT.onnx or OUT.pt2')
    parser.add_argument(
        '--dynamic', action='store_true', help='support any image size and batch size'
    )
    parser.add_argument(
        '--size',
        nargs=2,
        type=int,
        metavar=('H', 'W'),
        help='image size in pixels; default: that of the config',
    )
    parser.add_argument(
        '--backbone', action='store_true', help='export feature maps instead of scores'
    )
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()  # --help and a wrong argument end before the slow imports

import torch
from mmengine.config import Config
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from aft_mm.apis import load_model
from aft_mm.config.finding import install_command
from aft_mm.config.reading import read_config
from aft_mm.errors import CONFIG_ERRORS
from aft_mm.layers.mixers import AFTConv, AFTFull, AFTSimple, SoftmaxAttention
from aft_mm.models import AFTViT
from aft_mm.ops import record_paths, replay_paths

OPSET = 18
TOLERANCE = 1e-4
PACKAGES = ('onnx', 'onnxscript', 'onnxruntime')
# Other mixers split the tokens into blocks that depend on the grid size.
ANY_SIZE = (AFTConv, AFTFull, AFTSimple, SoftmaxAttention)


class Exported(nn.Module):
    """Wrap a classifier or a backbone as a function of tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        output = self.model(image)
        return (output,) if isinstance(output, Tensor) else tuple(output)


def trace(
    model: nn.Module, example: Tensor, smallest: int | None
) -> tuple[ExportedProgram, list[bool]]:
    """Return the graph of a model, and the recorded choices of AFT's forms.

    Args:
        model: Function of an image.
        example: Input [B, C, H, W] of the size of the graph.
        smallest: If given, the graph supports any B, and any H and W not below this size.
    """
    shapes = None
    if smallest is not None:
        height, width = (Dim(name, min=smallest) for name in ('height', 'width'))
        shapes = ({0: Dim('batch', min=1), 2: height, 3: width},)
    with torch.no_grad():
        with record_paths() as paths:
            model(example)
        with replay_paths(paths):
            program = torch.export.export(model, (example,), dynamic_shapes=shapes, strict=False)
    return program, paths


def write(program: ExportedProgram, names: Sequence[str], path: Path) -> None:
    """Write a graph in the format given by the file suffix."""
    if path.suffix == '.pt2':
        torch.export.save(program, path)
        return
    # It warns about every op with several outputs that it does not optimise.
    logging.getLogger('onnxscript.optimizer').setLevel(logging.ERROR)
    onnx_program = torch.onnx.export(
        program,
        dynamo=True,
        opset_version=OPSET,
        input_names=['image'],
        output_names=names,
        verbose=False,
    )
    onnx_program.save(str(path), external_data=False)


def load(path: Path) -> Callable[[Tensor], Sequence[Tensor]]:
    """Load an exported file as a function of an image."""
    if path.suffix == '.pt2':
        return torch.export.load(path).module()
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=['CPUExecutionProvider'])

    def call(image: Tensor) -> list[Tensor]:
        return [torch.from_numpy(part) for part in session.run(None, {'image': image.numpy()})]

    return call


def check(path: Path, model: nn.Module, shapes: Sequence[Sequence[int]]) -> float:
    """Compare a file with the model on random images and return the largest difference.

    Raises:
        UserError: The difference exceeds 1e-4 times the largest output, or times 1.
    """
    call, worst = load(path), 0.0
    for shape in shapes:
        image = torch.randn(*shape)
        with torch.no_grad():
            for ours, theirs in zip(model(image), call(image), strict=True):
                difference = (ours - theirs).abs().max().item()
                if not difference <= TOLERANCE * max(1.0, ours.abs().max().item()):
                    raise UserError(
                        f'the exported graph differs from the model by {difference:.1e} on an '
                        f'image of {" x ".join(map(str, shape))}, so {str(path)!r} is removed'
                    )
                worst = max(worst, difference)
    return worst


def check_args(args: argparse.Namespace) -> Config:
    """Check the arguments and return the config.

    Raises:
        UserError: An argument or a file cannot be used, or a package is missing.
    """
    if args.out.suffix not in ('.onnx', '.pt2'):
        raise UserError(f'OUT must end in .onnx or .pt2, got {str(args.out)!r}')
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if args.out.suffix == '.onnx' and missing:
        raise UserError(
            f'ONNX needs the packages {", ".join(missing)}: {install_command("export")}'
        )
    check_writable('OUT', [str(args.out)])
    config = read_config(args.config)
    settings = config.model.get('backbone', {})
    if settings.get('type') != 'aft_mm.AFTViT':
        raise UserError(
            f'the backbone of {args.config} must be aft_mm.AFTViT, got {settings.get("type")}'
        )
    settings.with_mask_channel = False  # marks padding, which images of a graph do not have
    if args.backbone:
        settings.out_type = 'featmap'
    elif config.model.type.rpartition('.')[2] != 'ImageClassifier':
        raise UserError(
            f'the model of {args.config} must be an image classifier, got {config.model.type}; use '
            '--backbone'
        )
    return config


def smallest_side(backbone: AFTViT) -> int:
    """Return the minimum image side in pixels for a graph of any size.

    Raises:
        UserError: The mixer does not support such a graph.
    """
    mixer = backbone.layers[0].token_mixer
    if not isinstance(mixer, ANY_SIZE):
        allowed = ', '.join(kind.__name__ for kind in ANY_SIZE)
        raise UserError(f'--dynamic needs one of the mixers {allowed}, got {type(mixer).__name__}')
    # A grid with one row or column has another graph, since torch broadcasts sizes of 1.
    return backbone.patch_embed.patch_size + 1


def export(args: argparse.Namespace) -> str:
    """Export and check the graph, and return a description of it.

    Raises:
        UserError: The model cannot be exported with these arguments.
    """
    config = check_args(args)
    _, model = load_model(config, args.checkpoint, device='cpu')
    backbone, settings = model.backbone, config.model.backbone
    size = args.size or settings.get('img_size', 224)
    height, width = (size, size) if isinstance(size, int) else size
    patch, channels = backbone.patch_embed.patch_size, backbone.patch_embed.projection.in_channels
    smallest = smallest_side(backbone) if args.dynamic else None
    if min(height, width) < (smallest or 1):
        raise UserError(f'--size must be at least {smallest or 1}, got {height} {width}')
    shapes = [(2 if args.dynamic else 1, channels, height, width)]
    names = ['scores']
    if args.backbone:
        names = [f'map{index}' for index in backbone.out_indices]
    exported = Exported(backbone if args.backbone else model).eval()
    program, paths = trace(exported, torch.randn(*shapes[0]), smallest)
    write(program, names, args.out)
    if args.dynamic:  # other grids, and sizes that are not a multiple of the patch size
        shapes += [
            (1, channels, width + patch, height),
            (3, channels, height, width + patch // 2 + 1),
        ]
    try:
        difference = check(args.out, exported, shapes)
    except BaseException:  # including interrupts: keep no file that was not checked
        args.out.unlink()
        raise
    sides = f'H and W from {smallest}' if args.dynamic else f'{height} x {width}'
    safe = f', {paths.count(False)} sums in the safe form' if not all(paths) else ''
    kind = f'ONNX opset {OPSET}' if args.out.suffix == '.onnx' else f'torch {torch.__version__}'
    return (
        f'{args.out}: {kind}, {"any batch" if args.dynamic else "batch 1"}, {sides}{safe}; '
        f'differs from the model by at most {difference:.1e}'
    )


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with user_errors(*CONFIG_ERRORS):
        print(export(args))


if __name__ == '__main__':
    main()
