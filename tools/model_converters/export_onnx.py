"""Export a trained model: OUT.onnx for ONNX (opset 18), OUT.pt2 for torch.

The input of the graph is `image` [B, C, H, W], normalised like the data_preprocessor of the config
but without mask channel. A classifier returns `scores` [B, classes] before the softmax, a segmentor
`scores` [B, classes, H, W] before the softmax, and a single-stage detector with anchors `boxes`
[B, N, 4], x1, y1, x2, y2 in pixels of the input, and `scores` [B, N, classes] after the sigmoid: all
boxes, before non-maximum suppression. With --backbone the outputs are maps [B, D, H', W'], one per
entry of out_indices. A text model reads `tokens`, bytes int64 [B, T], and returns `scores` [B, T, 256]
before the softmax; row t predicts byte t from those before it, so text may be padded at the end.
With --dynamic, for classifiers and backbones, B is arbitrary, and H and W are at least one patch
plus one pixel.

AFT chooses among several forms of its sums depending on the values of keys and biases, which a
graph cannot do. The exported form depends on the position biases of the checkpoint only and is
valid for keys of any range, and hence for any image. A slower form is used for biases with a range
above 60 nats and for windows without global connectivity. The exported file is compared with the
model on other images, with --dynamic also of other sizes.
"""

import argparse
import importlib.util
import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

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
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

from aft_mm.apis import load_model
from aft_mm.apis.loading import task_of
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

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        output = self.model(inputs)
        return (output,) if isinstance(output, Tensor) else tuple(output)


class Segmentor(Exported):
    """Wrap a segmentor: the scores at the size of the image."""

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        return (
            nn.functional.interpolate(
                self.model(inputs),
                inputs.shape[2:],
                mode='bilinear',
                align_corners=self.model.align_corners,
            ),
        )


class Detector(Exported):
    """Wrap a single-stage detector with anchors: its boxes and their scores."""

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        head = self.model.bbox_head
        levels = [[level.permute(0, 2, 3, 1) for level in output] for output in self.model(inputs)]
        scores, deltas = (
            torch.cat([level.reshape(len(inputs), -1, size) for level in output], 1)
            for output, size in zip(levels, (head.cls_out_channels, 4), strict=True)
        )
        anchors = head.prior_generator.grid_priors(
            [level.shape[1:3] for level in levels[0]], device=inputs.device
        )
        boxes = head.bbox_coder.decode(torch.cat(anchors), deltas[0])  # of the only image
        most = boxes.new_tensor(inputs.shape[:1:-1]).repeat(2)  # W, H, W, H
        return boxes.clamp(min=0).minimum(most)[None], scores.sigmoid()


class TextModel(Exported):
    """Wrap a text model: the scores of every byte."""

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        return (self.model.head.logits(self.model.decoder(inputs)),)


#: Wrapper and names of the outputs for each type of model.
KINDS: Mapping[str, tuple[type[Exported], list[str]]] = {
    'ImageClassifier': (Exported, ['scores']),
    'EncoderDecoder': (Segmentor, ['scores']),
    'RetinaNet': (Detector, ['boxes', 'scores']),
    'AutoregressiveModel': (TextModel, ['scores']),
}


def trace(
    model: nn.Module, example: Tensor, smallest: int | None
) -> tuple[ExportedProgram, list[bool]]:
    """Return the graph of a model, and the recorded choices of AFT's forms.

    Args:
        model: Function of an image or a text.
        example: Input of the size of the graph.
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


def example(shape: Sequence[int]) -> Tensor:
    """Return random tokens [B, T], or a random image [B, C, H, W]."""
    return torch.randint(256, shape) if len(shape) == 2 else torch.randn(*shape)


def shrink_constants(program: ExportedProgram) -> None:
    """Replace constants outside of float32 by its extremes.

    The exporter to ONNX writes them as float32, also in the float64 sums of the safe form, where the
    lowest number means an empty sum and would become −inf.
    """
    limits = torch.finfo(torch.float32)

    def shrunk(value: Any) -> Any:
        if not isinstance(value, float) or not math.isfinite(value) or value == 0:
            return value
        return math.copysign(min(max(abs(value), limits.tiny), limits.max), value)

    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                node.args = map_aggregate(node.args, shrunk)
            module.recompile()


def write(program: ExportedProgram, names: Sequence[str], path: Path) -> None:
    """Write a graph in the format given by the file suffix.

    Args:
        program: The graph.
        names: Names of its input and outputs.
        path: The file.
    """
    if path.suffix == '.pt2':
        torch.export.save(program, path)
        return
    shrink_constants(program)
    # It warns about every op with several outputs that it does not optimise.
    logging.getLogger('onnxscript.optimizer').setLevel(logging.ERROR)
    onnx_program = torch.onnx.export(
        program,
        dynamo=True,
        opset_version=OPSET,
        input_names=names[:1],
        output_names=names[1:],
        verbose=False,
    )
    onnx_program.save(str(path), external_data=False)


def load(path: Path) -> Callable[[Tensor], Sequence[Tensor]]:
    """Load an exported file as a function of its input."""
    if path.suffix == '.pt2':
        return torch.export.load(path).module()
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=['CPUExecutionProvider'])

    (name,) = [given.name for given in session.get_inputs()]

    def call(inputs: Tensor) -> list[Tensor]:
        return [torch.from_numpy(part) for part in session.run(None, {name: inputs.numpy()})]

    return call


def check(path: Path, model: nn.Module, shapes: Sequence[Sequence[int]]) -> float:
    """Compare a file with the model on random inputs and return the largest difference.

    Raises:
        UserError: The difference exceeds 1e-4 times the largest output, or times 1.
    """
    call, worst = load(path), 0.0
    for shape in shapes:
        inputs = example(shape)
        with torch.no_grad():
            for ours, theirs in zip(model(inputs), call(inputs), strict=True):
                difference = (ours - theirs).abs().max().item()
                if not difference <= TOLERANCE * max(1.0, ours.abs().max().item()):
                    raise UserError(
                        f'the exported graph differs from the model by {difference:.1e} on an '
                        f'input of {" x ".join(map(str, shape))}, so {str(path)!r} is removed'
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
    kind = kind_of(config)
    if kind == 'AutoregressiveModel' and task_of(config) == 'TextGenerator':
        if args.dynamic or args.size or args.backbone:
            raise UserError('a text model has one length and no --dynamic, --size and --backbone')
        return config
    settings = config.model.get('backbone', {})
    if settings.get('type') != 'aft_mm.AFTViT':
        raise UserError(
            f'the model of {args.config} must have the backbone aft_mm.AFTViT or be a text model, '
            f'got {settings.get("type") or config.model.type}'
        )
    settings.with_mask_channel = False  # marks padding, which images of a graph do not have
    if args.backbone:
        settings.out_type = 'featmap'
    elif kind not in KINDS:
        raise UserError(
            f'the model of {args.config} must be one of {", ".join(KINDS)}, got '
            f'{config.model.type}; use --backbone'
        )
    elif args.dynamic and kind != 'ImageClassifier':
        raise UserError(f'--dynamic needs a classifier or --backbone, got {config.model.type}')
    return config


def kind_of(config: Config) -> str:
    """Return the type of a model without its library."""
    return config.model.type.rpartition('.')[2]


def image_size(config: Config) -> tuple[int, int]:
    """Return height and width that a config gives its images, or those of its backbone."""
    size = config.model.backbone.get('img_size', 224)
    if kind_of(config) != 'ImageClassifier':
        prepares = config.model.get('data_preprocessor', {}).get('preprocessor', {})
        steps = config.get('test_dataloader', {}).get('dataset', {}).get('pipeline') or ()
        scales = [step.get('scale') for step in steps if step['type'].endswith('Resize')]
        scales = [scale for scale in scales if isinstance(scale, list | tuple)]
        size = scales[0][::-1] if scales else prepares.get('size') or size
    return (size, size) if isinstance(size, int) else tuple(size)


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
    wrapper, names = KINDS[kind_of(config)] if not args.backbone else (Exported, [])
    smallest = None
    if wrapper is TextModel:
        names = ['tokens', *names]
        shapes = [(1, model.decoder.max_length)]
    else:
        backbone = model.backbone
        height, width = args.size or image_size(config)
        patch = backbone.patch_embed.patch_size
        channels = backbone.patch_embed.projection.in_channels
        smallest = smallest_side(backbone) if args.dynamic else None
        if min(height, width) < (smallest or 1):
            raise UserError(f'--size must be at least {smallest or 1}, got {height} {width}')
        names = ['image', *(names or [f'map{index}' for index in backbone.out_indices])]
        shapes = [(2 if args.dynamic else 1, channels, height, width)]
    exported = wrapper(backbone if args.backbone else model).eval()
    program, paths = trace(exported, example(shapes[0]), smallest)
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
    shape = ['B', channels, 'H', 'W'] if args.dynamic else shapes[0]
    safe = f', {paths.count(False)} sums in the safe form' if not all(paths) else ''
    kind = f'ONNX opset {OPSET}' if args.out.suffix == '.onnx' else f'torch {torch.__version__}'
    return (
        f'{args.out}: {kind}, {names[0]} [{", ".join(map(str, shape))}] to '
        f'{", ".join(names[1:])}{f", H and W from {smallest}" if smallest else ""}{safe}; '
        f'differs from the model by at most {difference:.1e}'
    )


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    # Of torch and its exporter about their own code.
    warnings.simplefilter('ignore', FutureWarning)
    warnings.filterwarnings('ignore', message='The given buffer is not writable')
    with user_errors(*CONFIG_ERRORS):
        print(export(args))


if __name__ == '__main__':
    main()
