"""Export a trained model: OUT.onnx for ONNX (opset 20), OUT.xml for OpenVINO, OUT.pt2 for torch.

An image model reads `image` [B, C, H, W], normalised like the data_preprocessor of the config but
without mask channel. Its outputs are

- of a classifier, `scores` [B, classes] before the softmax;
- of a segmentor, `scores` [B, classes, H, W] before the softmax;
- of a single-stage detector with anchors, its N best boxes after non-maximum suppression, up to
  max_per_img of test_cfg and without score_thr: `boxes` [N, 4], x1, y1, x2, y2 in pixels of the
  input, `scores` [N] after the sigmoid, in descending order, and `labels` [N];
- with --backbone, maps [B, D, H', W'], one per entry of out_indices.

With --loops, AFT-conv is an operator in C++, in a library for processors with the instructions of this
one. ONNX Runtime loads it by `SessionOptions.register_custom_ops_library('OUT.loops.so')`, and
OpenVINO by `Core.add_extension('OUT.openvino.so')`. The latter is compiled, for the installed
release.

With --bfloat16, the loops for OpenVINO round their inputs to bfloat16, which is faster on a processor
with instructions for it (AMX or AVX512_BF16). It is for inference in bfloat16, which is OpenVINO's
default there.

With --dynamic, for classifiers and backbones, B is arbitrary, and H and W are at least one patch
plus one pixel.

A text model reads `tokens`, bytes int64 [B, T], and returns `scores` [B, T, 256] before the
softmax; row t predicts byte t from those before it, so text may be padded at the end. A CTC model
reads `frames` [B, T, F] and `mask` [B, T], and returns `log_probs` [B, T, V].

With --steps, an autoregressive model with a categorical head gives two files for batch 1.
OUT-prompt reads `tokens` [1, L], L from 0 on (a translation also `source` and `source_mask`
[1, S]), and returns `scores` [1, V] of the next token and the state. OUT-step reads `token` [1] and
the state, and returns `scores` and the next state. examples/generate_onnx.py is the loop.

A graph is valid for keys of any range. It is slower for biases with a range above 60 nats and for
windows without global connectivity. It is compared with the model on other inputs, also of other
sizes where sizes are open.
"""

import argparse
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from aft_mm.cli.arguments import tool_parser
from aft_mm.errors import UserError, user_errors
from aft_mm.outputs import check_writable


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument('config', help='path or name of the config')
    parser.add_argument('checkpoint', help='path of a checkpoint written by `aft_mm train`')
    parser.add_argument('out', metavar='OUT', type=Path, help='OUT.onnx, OUT.xml or OUT.pt2')
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
    parser.add_argument(
        '--steps', action='store_true', help='export a prompt and a step, to generate sequences'
    )
    parser.add_argument(
        '--int8', action='store_true', help='quantise matrix products of OUT.onnx or OUT.xml'
    )
    parser.add_argument(
        '--loops',
        action='store_true',
        help='compute AFT-conv by C++ loops, in OUT.loops.so or, next to OUT.xml, OUT.openvino.so',
    )
    parser.add_argument(
        '--bfloat16',
        action='store_true',
        help='round the inputs of the loops in OUT.xml to bfloat16, for inference in bfloat16',
    )
    parser.add_argument(
        '--test',
        action='store_true',
        help='compute the metrics of a classifier and of OUT on the test data of the config',
    )
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()  # before the slow imports

import torch
from exported_graphs import Call, Decoder, Graph, Transcriber, check_decoder, check_encoder
from graph_files import (
    OPSET,
    PACKAGES,
    RUNTIMES,
    check_loops,
    check_packages,
    library_of,
    load,
    quantize,
    remove,
    round_inputs_of_loops,
    size_of,
    trace,
    write,
    write_library,
)
from mmengine.config import Config
from mmengine.evaluator import Evaluator
from mmengine.registry import init_default_scope
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.export import Dim
from torch.utils.data import DataLoader
from torchvision.ops import nms

from aft_mm.apis.loading import build_model, load_trained, task_of
from aft_mm.config.finding import check_checkpoint
from aft_mm.config.reading import check_data, read_config
from aft_mm.errors import CONFIG_ERRORS
from aft_mm.layers import ConvPatchEmbedding
from aft_mm.layers.mixers import AFTConv, AFTFull, AFTSimple, SoftmaxAttention
from aft_mm.models import AFTViT

TOLERANCE = 1e-4
# Root mean square of the change over that of the scores around their mean.
ROUNDED_TOLERANCE = 0.1
EXAMPLES = 300  # for the ranges of int8
CHECKED = 50
# Other mixers split the tokens into blocks that depend on the grid size.
ANY_SIZE = (AFTConv, AFTFull, AFTSimple, SoftmaxAttention)


class Exported(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        output = self.model(inputs)
        return (output,) if isinstance(output, Tensor) else tuple(output)

    @staticmethod
    def match(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(ours, theirs, strict=True)


class Segmentor(Exported):
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
    """The best boxes of a single-stage detector with anchors, after non-maximum suppression.

    They are right for any `score_thr`, since a box suppresses only boxes of lower scores.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        settings = model.test_cfg
        if settings.nms.type != 'nms' or not model.bbox_head.use_sigmoid_cls:
            raise UserError(
                'the detector must have sigmoid scores and test_cfg.nms of type nms, got '
                f'{settings.nms.type} and use_sigmoid_cls={model.bbox_head.use_sigmoid_cls}'
            )

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        head, settings = self.model.bbox_head, self.model.test_cfg
        classes, device = head.cls_out_channels, inputs.device
        levels = list(zip(*self.model(inputs), strict=True))
        grids = [logits.shape[2:] for logits, _ in levels]
        best = []
        for (logits, deltas), anchors in zip(
            levels, head.prior_generator.grid_priors(grids, device=device), strict=True
        ):
            scores = logits[0].permute(1, 2, 0).sigmoid().flatten()
            scores, entry = scores.topk(min(settings.nms_pre, len(scores)))
            anchor = entry // classes
            deltas = deltas[0].permute(1, 2, 0).reshape(-1, 4)[anchor]
            best.append((scores, entry % classes, head.bbox_coder.decode(anchors[anchor], deltas)))
        scores, labels, boxes = (torch.cat(parts) for parts in zip(*best, strict=True))
        most = boxes.new_tensor(inputs.shape[:1:-1]).repeat(2)  # W, H, W, H
        boxes = boxes.clamp(min=0).minimum(most)
        # Boxes of other classes are moved apart, as in mmcv.
        moved = boxes + labels[:, None] * (boxes.max() + 1)
        keep = nms(moved, scores, settings.nms.iou_threshold)
        inside = (boxes[:, 2:] - boxes[:, :2] > settings.get('min_bbox_size', -1)).all(1)
        keep = keep[inside[keep]][: settings.max_per_img]
        return boxes[keep], scores[keep], labels[keep]

    @staticmethod
    def match(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rows of `ours`, each with the nearest of `theirs` of the same class.

        Boxes with equal scores come in either order, and the last of them may be missing.
        """
        sure = ours[1] > min(ours[1].min(), theirs[1].min()) + TOLERANCE
        rows, others = (
            torch.cat([boxes, scores[:, None], labels[:, None]], 1)
            for boxes, scores, labels in (ours, theirs)
        )
        rows = rows[sure]
        classes = rows.new_tensor([1, 1, 1, 1, 1, 1e4])
        yield rows, others[torch.cdist(rows * classes, others * classes, p=1).argmin(1)]


class TextModel(Exported):
    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        return (self.model.head.logits(self.model.decoder(inputs)),)


#: Wrapper and output names by type of model.
KINDS: Mapping[str, tuple[type[Exported], list[str]]] = {
    'ImageClassifier': (Exported, ['scores']),
    'EncoderDecoder': (Segmentor, ['scores']),
    'RetinaNet': (Detector, ['boxes', 'scores', 'labels']),
    'AutoregressiveModel': (TextModel, ['scores']),
}


def example(shape: Sequence[int]) -> Tensor:
    return torch.randint(256, shape) if len(shape) == 2 else torch.randn(*shape)


class OneInput:
    """The graph of a function of an image or a text, and its check.

    `size` is the shape of an example, and `patch` the side of a patch in pixels. With `smallest`,
    the graph supports any B, and any H and W not below this size.
    """

    def __init__(
        self,
        model: Exported,
        names: list[str],
        size: tuple[int, ...],
        patch: int = 0,
        smallest: int | None = None,
    ) -> None:
        self.model, self.inputs, axes = model, [example(size)], None
        if smallest is not None:
            height, width = (Dim(name, min=smallest) for name in ('height', 'width'))
            axes = [{0: Dim('batch', min=1), 2: height, 3: width}]
            # Other grids, and sizes that are not a multiple of the patch size.
            _, channels, high, wide = size
            self.inputs += [
                example((1, channels, wide + patch, high)),
                example((3, channels, high, wide + patch // 2 + 1)),
            ]
        self.graphs = [Graph('', model, {names[0]: example(size)}, names[1:], axes)]
        self.name = names[0]

    def cases(self, calls: Mapping[str, Call]) -> Iterator[tuple[str, Tensor, Tensor]]:
        for inputs in self.inputs:
            name = f'input of {" x ".join(map(str, inputs.shape))}'
            found = calls['']({self.name: inputs})
            for ours, theirs in self.model.match(self.model(inputs), found):
                yield name, ours, theirs


Exportable = OneInput | Decoder | Transcriber


def outputs_of(
    exportable: Exportable, paths: Sequence[Path]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield cases, with the outputs of the model and of the files.

    Raises:
        UserError: The runtime fails.
    """
    try:
        calls = {
            graph.name: load(path, graph)
            for graph, path in zip(exportable.graphs, paths, strict=True)
        }
        yield from exportable.cases(calls)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # runtimes have types of their own
        lines = str(error).strip().splitlines() or [type(error).__name__]
        runtime, others = RUNTIMES[paths[0].suffix], [x for x in RUNTIMES if x != paths[0].suffix]
        raise UserError(
            f'{runtime} cannot run the graph, try {" or ".join(others)}: {lines[0]}'
        ) from error


@torch.no_grad()
def check(exportable: Exportable, paths: Sequence[Path]) -> float:
    """Compare files with the model on other inputs and return the largest difference.

    Raises:
        UserError: It exceeds 1e-4 times the largest output, or times 1.
    """
    worst = 0.0
    for name, ours, theirs in outputs_of(exportable, paths):
        difference = (ours - theirs).abs().max().item()
        if not difference <= TOLERANCE * max(1.0, ours.abs().max().item()):
            files = ', '.join(repr(str(path)) for path in paths)
            raise UserError(
                f'the exported graph differs from the model by {difference:.1e} on a random '
                f'{name}, so {files} is removed'
            )
        worst = max(worst, difference)
    return worst


@torch.no_grad()
def check_rounded(exportable: Exportable, paths: Sequence[Path], option: str) -> float:
    changes, outputs = [], []
    for _, ours, theirs in outputs_of(exportable, paths):
        changes.append((ours - theirs).flatten())
        outputs.append((ours - ours.mean()).flatten())
    change = (torch.cat(changes).square().mean() / torch.cat(outputs).square().mean()).sqrt().item()
    if not change <= ROUNDED_TOLERANCE:
        raise UserError(
            f'--{option} changes the outputs by {change:.1%} of their deviation, more than '
            f'{ROUNDED_TOLERANCE:.0%}, so the file is removed'
        )
    return change


def build_loader(config: Config, split: str) -> DataLoader:
    init_default_scope(config.get('default_scope', 'mmpretrain'))
    return Runner.build_dataloader(config[f'{split}_dataloader'])


@torch.no_grad()
def example_images(config: Config, model: nn.Module) -> list[Tensor]:
    """Return images of the training data, one per batch."""
    images: list[Tensor] = []
    for batch in build_loader(config, 'train'):
        pixels = model.data_preprocessor(dict(inputs=batch['inputs']), False)['inputs']
        images += pixels.split(1)
        if len(images) >= EXAMPLES:
            break
    return images[:EXAMPLES]


@torch.no_grad()
def compare_metrics(
    config: Config, loader: DataLoader, model: nn.Module, call: Call, batched: bool
) -> str:
    """Return the metrics of the model and of a file on the test data, as text."""

    def scores_of_file(images: Tensor) -> Tensor:
        parts = [images] if batched else images.split(1)
        return torch.cat([call({'image': part.contiguous()})[0] for part in parts])

    evaluators = [Evaluator(config.test_evaluator) for _ in range(2)]
    for evaluator in evaluators:
        evaluator.dataset_meta = loader.dataset.metainfo
    for batch in loader:
        data = model.data_preprocessor(batch, False)
        for function, evaluator in zip((model, scores_of_file), evaluators, strict=True):
            scores = function(data['inputs']).softmax(1)
            for sample, score in zip(data['data_samples'], scores, strict=True):
                sample.set_pred_score(score)
            evaluator.process(data['data_samples'], batch)
    found = [evaluator.evaluate(len(loader.dataset)) for evaluator in evaluators]
    metrics = [f'{name} {value:.2f} -> {found[1][name]:.2f}' for name, value in found[0].items()]
    return f'; {len(loader.dataset)} test images: {", ".join(metrics)}'


def check_args(args: argparse.Namespace) -> Config:
    if args.out.suffix not in PACKAGES:
        raise UserError(f'OUT must end in .onnx, .xml or .pt2, got {str(args.out)!r}')
    for name in ('int8', 'loops'):
        if getattr(args, name) and args.out.suffix == '.pt2':
            raise UserError(f'OUT must end in .onnx or .xml for --{name}, got {str(args.out)!r}')
    if args.bfloat16 and not (args.loops and args.out.suffix == '.xml'):
        raise UserError(f'--bfloat16 needs --loops and OUT.xml, got {str(args.out)!r}')
    check_packages(args.out.suffix, args.int8)
    if args.loops:
        check_loops(args.out.suffix)
    check_writable('OUT', [str(args.out)])
    config = read_config(args.config)
    kind = kind_of(config)
    if args.test and (
        kind != 'ImageClassifier' or args.backbone or 'test_dataloader' not in config
    ):
        raise UserError(f'--test needs a classifier and a test_dataloader, got {config.model.type}')
    if args.test:
        check_data(config, 'test')
    if args.int8 and args.out.suffix == '.xml':
        if kind != 'ImageClassifier' or args.size or 'train_dataloader' not in config:
            raise UserError(
                '--int8 for OUT.xml needs a classifier with a train_dataloader, whose images it '
                f'reads, and no --size, got {config.model.type}'
            )
        check_data(config, 'train')
    if args.steps and kind != 'AutoregressiveModel':
        raise UserError(f'--steps needs an autoregressive model, got {config.model.type}')
    if args.steps and args.loops:
        raise UserError('--loops must be left out with --steps, as steps have no loops')
    if kind == 'CTCModel' or args.steps:
        for name in ('dynamic', 'size', 'backbone'):
            if getattr(args, name):
                raise UserError(f'--{name} is for images, got {config.model.type}')
        return config
    if kind == 'AutoregressiveModel' and task_of(config) == 'TextGenerator':
        if args.dynamic or args.size or args.backbone:
            raise UserError('a text model has one length and no --dynamic, --size and --backbone')
        return config
    if kind == 'AutoregressiveModel':
        raise UserError(f'the model of {args.config} needs --steps, which exports its generation')
    settings = config.model.get('backbone', {})
    if settings.get('type') != 'aft_mm.AFTViT':
        raise UserError(
            f'the model of {args.config} must have the backbone aft_mm.AFTViT or be a text model, '
            f'got {settings.get("type") or config.model.type}'
        )
    settings.with_mask_channel = False  # it marks padding, which images of a graph do not have
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
    return config.model.type.rpartition('.')[2]


def image_size(config: Config) -> tuple[int, int]:
    size = config.model.backbone.get('img_size', 224)
    if kind_of(config) != 'ImageClassifier':
        prepares = config.model.get('data_preprocessor', {}).get('preprocessor', {})
        steps = config.get('test_dataloader', {}).get('dataset', {}).get('pipeline') or ()
        scales = [step.get('scale') for step in steps if step['type'].endswith('Resize')]
        scales = [scale for scale in scales if isinstance(scale, list | tuple)]
        size = scales[0][::-1] if scales else prepares.get('size') or size
    return (size, size) if isinstance(size, int) else tuple(size)


def smallest_side(args: argparse.Namespace, backbone: AFTViT) -> int:
    patch = backbone.patch_embed.patch_size
    if not args.dynamic:
        return patch
    mixer = backbone.layers[0].token_mixer
    if not isinstance(mixer, ANY_SIZE):
        allowed = ', '.join(kind.__name__ for kind in ANY_SIZE)
        raise UserError(f'--dynamic needs one of the mixers {allowed}, got {type(mixer).__name__}')
    if isinstance(backbone.patch_embed, ConvPatchEmbedding):
        raise UserError('--dynamic needs the patch embedding of conv_stem=False, got True')
    # A grid with one row or column has another graph, since torch broadcasts sizes of 1.
    return patch + 1


def check_model(args: argparse.Namespace, config: Config, model: nn.Module) -> None:
    """Raise a UserError for a model without a graph."""
    if args.steps:
        check_decoder(model, args.config)
    elif kind_of(config) == 'CTCModel':
        check_encoder(model.encoder, args.config)
    elif kind_of(config) != 'AutoregressiveModel':
        if not args.backbone:
            KINDS[kind_of(config)][0](model)
        height, width = args.size or image_size(config)
        smallest = smallest_side(args, model.backbone)
        if min(height, width) < smallest:
            raise UserError(f'--size must be at least {smallest}, got {height} {width}')


def make_exportable(
    args: argparse.Namespace, config: Config, model: nn.Module
) -> tuple[Exportable, str]:
    if args.steps:
        decoder = Decoder(model)
        return decoder, f'tokens [1, 0 to {decoder.longest}] to scores and state'
    if kind_of(config) == 'CTCModel':
        transcriber = Transcriber(model)
        return transcriber, f'frames [B, 1 to {transcriber.longest}, F] to log_probs'
    wrapper, names = KINDS[kind_of(config)] if not args.backbone else (Exported, [])
    if wrapper is TextModel:
        names, shape = ['tokens', *names], (1, model.decoder.max_length)
        one = OneInput(wrapper(model).eval(), names, shape)
        return one, f'tokens [{shape[0]}, {shape[1]}] to scores'
    backbone = model.backbone
    height, width = args.size or image_size(config)
    patch, channels = backbone.patch_embed.patch_size, backbone.patch_embed.in_channels
    smallest = smallest_side(args, backbone) if args.dynamic else None
    names = ['image', *(names or [f'map{index}' for index in backbone.out_indices])]
    size = (2 if args.dynamic else 1, channels, height, width)
    exported = wrapper(backbone if args.backbone else model).eval()
    shape = ['B', channels, 'H', 'W'] if args.dynamic else size
    about = f'image [{", ".join(map(str, shape))}] to {", ".join(names[1:])}'
    if smallest:
        about += f', H and W from {smallest}'
    return OneInput(exported, names, size, patch, smallest), about


def export(args: argparse.Namespace) -> str:
    config = check_args(args)
    check_checkpoint(args.checkpoint)
    model = build_model(config).eval().requires_grad_(False)
    check_model(args, config, model)
    load_trained(model, config, args.checkpoint)
    exportable, sizes = make_exportable(args, config, model)
    loader = build_loader(config, 'test') if args.test else None
    images = example_images(config, model) if args.int8 and args.out.suffix == '.xml' else []
    paths, begun, choices = [], [], []
    for graph in exportable.graphs:
        name = f'{args.out.stem}-{graph.name}' if graph.name else args.out.stem
        paths.append(args.out.with_name(name + args.out.suffix))
    notes = ''
    try:
        for graph, path in zip(exportable.graphs, paths, strict=True):
            program, chosen = trace(graph, path.suffix, args.loops)
            choices += chosen
            begun.append(path)  # a graph that cannot be traced leaves an earlier file
            if path.suffix != '.pt2':
                library_of(path).unlink(missing_ok=True)  # of an earlier export
            if args.loops:
                write_library(path)
            write(program, graph, path)
        difference = check(exportable, paths)
        if args.bfloat16:
            round_inputs_of_loops(*paths)
            change = check_rounded(exportable, paths, 'bfloat16')
            notes = f'; bfloat16: outputs change by {change:.1%}'
        if args.int8:
            before = sum(map(size_of, paths))
            for path in paths:
                quantize(path, images)
            if images:  # their ranges are known, not those of random inputs
                exportable.inputs = images[:CHECKED]
            ratio = sum(map(size_of, paths)) / before
            change = check_rounded(exportable, paths, 'int8')
            notes += f'; int8: {ratio:.2f} x the bytes, outputs change by {change:.1%}'
        if loader is not None:
            call = load(paths[0], exportable.graphs[0])
            notes += compare_metrics(config, loader, model, call, args.dynamic)
    except BaseException:  # including interrupts: keep no file that was not checked
        for path in begun:
            remove(path)
        raise
    safe = f', {choices.count(False)} sums in the safe form' if not all(choices) else ''
    kinds = {'.pt2': f'torch {torch.__version__}', '.xml': 'OpenVINO'}
    return (
        f'{", ".join(map(str, paths))}: {kinds.get(args.out.suffix, f"ONNX opset {OPSET}")}, '
        f'{sizes}{safe}; differs from the model by at most {difference:.1e}{notes}'
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
