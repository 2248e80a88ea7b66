"""Export of a trained model: its options, and the steps from the config to checked files."""

import argparse
import warnings
from typing import Any

from mmengine.config import Config
from torch import nn

from aft_mm.apis.loading import build_model, load_trained, task_of
from aft_mm.config.masks import input_size
from aft_mm.config.reading import check_data, read_config
from aft_mm.config.texts import type_name
from aft_mm.errors import CONFIG_ERRORS, UserError, user_errors
from aft_mm.outputs import check_suffix, check_writable

from .. import __version__
from .comparison import build_loader, check, check_rounded, compare_metrics, example_images
from .files import FORMATS, GraphFile, OpenVINOFile
from .graphs import Exportable, describe_images, describe_task, trace, type_of
from .image_graphs import IMAGE_MODELS, Backbone, Image, Text
from .sequence_graphs import Decoder, Transcriber

CHECKED = 50  # images


def run(args: argparse.Namespace) -> None:
    # Of torch and its exporter about their own code.
    warnings.simplefilter('ignore', FutureWarning)
    warnings.filterwarnings('ignore', message='The given buffer is not writable')
    with user_errors(*CONFIG_ERRORS):
        print(export(args))


def export(args: argparse.Namespace) -> str:
    config = check_args(args)
    model = build_model(config).requires_grad_(False)
    exportable = make_exportable(args, config, model)
    load_trained(model, config, args.checkpoint)
    model.eval()
    loader = build_loader(config, 'test') if args.test else None
    kind = FORMATS[args.out.suffix]
    images = example_images(config, model) if args.int8 and kind is OpenVINOFile else []
    metadata = describe(args, config, model, exportable)
    begun: list[GraphFile] = []
    choices, notes = [], ''
    try:
        for graph in exportable.graphs:
            graph = graph._replace(metadata={**metadata, **graph.metadata})
            name = f'{args.out.stem}-{graph.name}' if graph.name else args.out.stem
            file = kind(args.out.with_name(name + args.out.suffix))
            file.check_notes(graph)
            program, paths = trace(graph, kind.runtime, args.loops)
            choices += paths
            # After the tracing: a graph that cannot be traced leaves an earlier file.
            begun.append(file)
            file.write(program, graph, args.loops)
            file.write_notes(graph)
        difference = check(exportable, begun)
        if args.bfloat16:
            for file in begun:
                file.round_inputs_of_loops()
            change = check_rounded(exportable, begun, 'bfloat16')
            notes = f'; bfloat16: outputs change by {change:.1%}'
        if args.int8:
            before = sum(file.size for file in begun)
            for file in begun:
                file.quantize(images)
            if isinstance(exportable, Image) and images:  # their ranges are known
                exportable.inputs = images[:CHECKED]
            ratio = sum(file.size for file in begun) / before
            change = check_rounded(exportable, begun, 'int8')
            notes += f'; int8: {ratio:.2f} x the bytes, outputs change by {change:.1%}'
        if loader is not None:
            call = begun[0].load(exportable.graphs[0])
            notes += compare_metrics(config, loader, model, call, args.dynamic)
    except BaseException:  # including interrupts: keep no file that was not checked
        for file in begun:
            file.remove()
        raise
    safe = f', {choices.count(False)} sums in the safe form' if not all(choices) else ''
    return (
        f'{", ".join(str(file.path) for file in begun)}: {kind.about}, {exportable.about}{safe}; '
        f'differs from the model by at most {difference:.1e}{notes}; '
        f'metadata in {", ".join(str(file.notes) for file in begun)}'
    )


def describe(
    args: argparse.Namespace, config: Config, model: Any, exportable: Exportable
) -> dict[str, Any]:
    about: dict[str, Any] = dict(version=__version__)
    about |= dict(task='features') if args.backbone else describe_task(config, model)
    if about['task'] == 'generation' and 'image_shape' in config:
        about['image_shape'] = list(config.image_shape)
    if not isinstance(exportable, Image):
        return about
    _, channels, *size = exportable.graphs[0].inputs['image'].shape
    about |= dict(size=size, dynamic=args.dynamic, **describe_images(config, model, channels))
    # The test pipeline makes images of another size.
    if args.size and about['task'].endswith('classification'):
        about.pop('resize', None)
    return about


def check_args(args: argparse.Namespace) -> Config:
    check_suffix('OUT', args.out, [*FORMATS])
    kind = FORMATS[args.out.suffix]
    for name in ('int8', 'loops'):
        if getattr(args, name):
            check_suffix(f'OUT for --{name}', args.out, ['.onnx', '.xml'])
    if args.bfloat16 and not (args.loops and kind is OpenVINOFile):
        raise UserError(f'--bfloat16 needs --loops and OUT.xml, got {str(args.out)!r}')
    kind.check_packages(args.int8)
    if args.loops:
        kind.check_loops()
    check_writable('OUT', [str(args.out)])
    config = read_config(args.config)
    if args.test:
        if type_of(config) != 'ImageClassifier' or args.backbone or 'test_dataloader' not in config:
            raise UserError(
                f'--test needs a classifier and a test_dataloader, got {config.model.type}'
            )
        check_data(config, 'test')
    if args.int8 and kind is OpenVINOFile:
        if type_of(config) != 'ImageClassifier' or args.size or 'train_dataloader' not in config:
            raise UserError(
                '--int8 for OUT.xml needs a classifier with a train_dataloader, whose images it '
                f'reads, and no --size, got {config.model.type}'
            )
        check_data(config, 'train')
    check_options_of_model(args, config)
    return config


def check_options_of_model(args: argparse.Namespace, config: Config) -> None:
    kind = type_of(config)
    of_images = [name for name in ('dynamic', 'size', 'backbone') if getattr(args, name)]
    if args.steps and kind != 'AutoregressiveModel':
        raise UserError(f'--steps needs an autoregressive model, got {config.model.type}')
    if args.steps and args.loops:
        raise UserError('--loops must be left out with --steps, as steps have no loops')
    if kind == 'CTCModel' or args.steps:
        if of_images:
            raise UserError(f'--{of_images[0]} is for images, got {config.model.type}')
    elif kind == 'AutoregressiveModel':
        if task_of(config) != 'TextGenerator':
            raise UserError(
                f'the model of {args.config} needs --steps, which exports its generation'
            )
        if of_images:
            raise UserError('a text model has one length and no --dynamic, --size and --backbone')
    else:
        part = type_name((config.model.get('backbone') or config.model).type)
        if part != 'AFTViT':
            raise UserError(
                f'the model of {args.config} must have the backbone aft_mm.AFTViT or be a text '
                f'model, got {part}'
            )
        if not args.backbone and kind not in IMAGE_MODELS:
            raise UserError(
                f'the model of {args.config} must be one of {", ".join(IMAGE_MODELS)}, '
                f'AutoregressiveModel, got {config.model.type}; use --backbone'
            )
        if not args.backbone and args.dynamic and kind != 'ImageClassifier':
            raise UserError(f'--dynamic needs a classifier or --backbone, got {config.model.type}')
        # It marks padding, which images of a graph do not have.
        config.model.backbone.with_mask_channel = False
        if args.backbone:
            config.model.backbone.out_type = 'featmap'


def make_exportable(args: argparse.Namespace, config: Config, model: nn.Module) -> Exportable:
    if args.steps:
        return Decoder(model, args.config)
    kind = type_of(config)
    if kind == 'CTCModel':
        return Transcriber(model, args.config)
    if kind == 'AutoregressiveModel':
        return Text(model)
    wrapper = Backbone(model.backbone) if args.backbone else IMAGE_MODELS[kind](model)
    size = args.size or input_size(config) or (224, 224)
    return Image(wrapper, model.backbone, size, args.dynamic)
