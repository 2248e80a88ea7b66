import argparse
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import mmengine
from mmengine.config import Config
from mmengine.evaluator import DumpResults

from aft_mm.analysis.training_summary import class_lines
from aft_mm.checkpoint import averaged
from aft_mm.checks import check_number, counted
from aft_mm.cli.arguments import refuse_given
from aft_mm.config.reading import check_data, data_sources
from aft_mm.config.texts import type_name
from aft_mm.engine import CheckpointCompatibilityHook, build_runner, load_run_config, run_guard
from aft_mm.engine.allocator import keep_freed_memory
from aft_mm.engine.by_class import add_by_class
from aft_mm.engine.preflight import TEST_CHECKS, check_torchvision
from aft_mm.engine.runner import task_model
from aft_mm.errors import CONFIG_ERRORS, DATA_ERRORS, UserError, user_errors
from aft_mm.hosts import quiet_pycocotools
from aft_mm.ops.dispatch import BackendError, requested_backends
from aft_mm.outputs import check_output
from aft_mm.visualization.figures import literal_text


class Host(NamedTuple):
    """A library whose tools test: its hook of pictures with two arguments, and its default --tta."""

    hook: str
    switch: str
    folder: str  # '' if the visualizer has it
    tta: dict[str, Any]


BOXES_TTA = dict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=100)
HOSTS = {
    'mmpretrain': Host(
        'VisualizationHook', 'enable', 'out_dir', dict(type='mmpretrain.AverageClsScoreTTA')
    ),
    'mmdet': Host(
        'DetVisualizationHook',
        'draw',
        'test_out_dir',
        dict(type='DetTTAModel', tta_cfg=BOXES_TTA),
    ),
    'mmseg': Host('SegVisualizationHook', 'draw', '', dict(type='mmseg.SegTTAModel')),
}
#: Backends of matplotlib that draw to files only.
WITHOUT_WINDOWS = ('agg', 'cairo', 'pdf', 'pgf', 'ps', 'svg', 'template')


def apply_args(cfg: Config, args: argparse.Namespace) -> None:
    cfg.load_from = args.checkpoint
    cfg.resume = False
    sources = list(filter(os.path.isfile, data_sources(cfg)))  # such as the annotations
    for option, suffix in (('out', '.json'), ('dump', '.pkl')):
        path = getattr(args, option)
        if path:
            check_output(f'--{option}', path, (suffix,), sources)
    if cfg.get('test_cfg') is None:
        raise UserError(f'testing needs test_cfg, which may be empty, in {args.config}')
    if args.amp:
        cfg.test_cfg.fp16 = True
    if not args.show:
        refuse_given(args, ['wait_time'], 'has no effect without --show')
    if args.show or args.show_dir:
        show_pictures(cfg, args)
    if args.tta:
        augment_test(cfg, args.config)
        # The state_dict holds averaged weights, and mmpretrain's EMAHook cannot load into a wrapper.
        hooks = cfg.get('custom_hooks') or ()
        cfg.custom_hooks = [hook for hook in hooks if not type_name(hook.type).endswith('EMAHook')]


def show_pictures(cfg: Config, args: argparse.Namespace) -> None:
    host = host_of(cfg, f'--show{"-dir" * bool(args.show_dir)}', args.config)
    if args.tta and cfg.default_scope == 'mmpretrain':  # its hook draws one copy of an image
        raise UserError('--tta and pictures cannot be combined for a classifier')
    if args.show and matplotlib.get_backend().lower() in WITHOUT_WINDOWS:
        raise UserError('--show needs a display; --show-dir writes the pictures to a folder')
    wait_time = 2.0 if args.wait_time is None else args.wait_time
    check_number('--wait-time', wait_time, 0)
    settings = {host.switch: True, 'interval': 1, 'show': args.show, 'wait_time': wait_time}
    if args.show_dir:
        folder = Path(args.show_dir).absolute()
        if folder.exists() and not (folder.is_dir() and next(folder.iterdir(), None) is None):
            raise UserError(f'--show-dir must be a new or empty folder, got {args.show_dir!r}')
        if cfg.default_scope == 'mmpretrain':  # its hook counts samples as if all batches were full
            cfg.test_dataloader.batch_size = 1
        if host.folder:
            settings[host.folder] = str(folder)
        else:
            writer = dict(type='LocalVisBackend', img_save_dir=str(folder))
            given = cfg.get('visualizer') or dict(type='SegLocalVisualizer')
            cfg.visualizer = dict(given, vis_backends=[writer])
    hooks = cfg.get('default_hooks') or {}
    hook = dict(hooks.get('visualization') or dict(type=host.hook), **settings)
    cfg.default_hooks = dict(hooks, visualization=hook)


def augment_test(cfg: Config, path: str) -> None:
    """Average over augmented copies, by default of the image and its mirror image as the hosts do."""
    dataset = cfg.test_dataloader.dataset
    while 'dataset' in dataset:  # a wrapper, such as RepeatDataset
        dataset = dataset.dataset
    if not cfg.get('tta_model'):
        cfg.tta_model = host_of(cfg, '--tta without tta_model', path).tta
    if not cfg.get('tta_pipeline'):
        host_of(cfg, '--tta without tta_pipeline', path)
        *steps, pack = dataset.pipeline
        if 'meta_keys' in pack:  # by which predictions are turned back
            pack.meta_keys = (*pack.meta_keys, 'flip', 'flip_direction')
        # The annotations are those of the first copy.
        flips = [dict(type='RandomFlip', prob=prob) for prob in (0.0, 1.0)]
        cfg.tta_pipeline = [*steps, dict(type='TestTimeAug', transforms=[flips, [pack]])]
    # The Runner would give it that of the whole config.
    own = {key: cfg.model[key] for key in ('data_preprocessor',) if key in cfg.model}
    cfg.model = dict(own, **cfg.tta_model, module=cfg.model)
    dataset.pipeline = cfg.tta_pipeline


def host_of(cfg: Config, option: str, path: str) -> Host:
    host = HOSTS.get(cfg.get('default_scope'))
    if host is None:
        raise UserError(f'{option} is for classifiers, detectors and segmentors, got {path!r}')
    return host


def test(args: argparse.Namespace) -> None:
    with user_errors(*CONFIG_ERRORS):
        requested_backends()
        keep_freed_memory()
        check_torchvision()
        cfg = load_run_config(args)
        if args.work_dir is None:  # a test dumps its config, too
            cfg.work_dir = os.path.join(cfg.work_dir, 'test')
        # Compared before options change the pipeline of the test.
        by_validation = cfg.get('test_dataloader') == cfg.get('val_dataloader')
        apply_args(cfg, args)
        check_data(cfg, 'test')
        if cfg.get('default_scope') == 'mmdet':
            quiet_pycocotools()
        runner = build_runner(cfg)
    with user_errors(*DATA_ERRORS):
        for check in TEST_CHECKS:
            check(cfg, runner)
        if args.tta and getattr(task_model(runner), 'with_mask', False):
            raise UserError(
                f'--tta is for boxes only, as mmdet averages no masks, got {args.config!r}'
            )
        add_by_class(runner.test_loop)
        if args.dump:
            runner.test_evaluator.metrics.append(DumpResults(out_file_path=args.dump))
    with user_errors(BackendError):
        runner.register_hook(CheckpointCompatibilityHook())
        with literal_text():  # in the pictures of hooks
            metrics = runner.test()
    if runner.rank == 0:
        if args.out:
            mmengine.dump(metrics, args.out)
        for name, line in class_lines(runner.message_hub.runtime_info).items():
            print(f'{name:11}{line}')
        if by_validation:
            print(f'{"data":11}those of the validation, by which a best checkpoint was chosen')
        if args.show_dir:
            pictures = sum(path.is_file() for path in Path(args.show_dir).rglob('*'))
            samples = len(runner.test_dataloader.dataset)
            fewer = '; images of the same file name share one' * (pictures < samples)
            print(
                f'{"pictures":11}{pictures:,} of {counted(samples, "image")} in {args.show_dir}{fewer}'
            )


def run(args: argparse.Namespace) -> None:
    with run_guard(), ExitStack() as stack:
        with user_errors(*DATA_ERRORS):
            weights = averaged(args.checkpoint, args.average)
            args.checkpoint = stack.enter_context(weights)
        test(args)
