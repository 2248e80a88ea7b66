"""Shared fixtures."""

import argparse
import atexit
import gc
import importlib.util
import itertools
import logging
import multiprocessing
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

# A fork cannot use the threads of its parent process.
os.environ['OMP_NUM_THREADS'] = '1'

import cv2  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from filelock import FileLock  # noqa: E402
from mmengine.config import Config  # noqa: E402
from mmengine.logging import MessageHub, MMLogger  # noqa: E402
from mmengine.registry import MODELS, DefaultScope  # noqa: E402
from mmengine.visualization import Visualizer  # noqa: E402

from aft_mm.cli.main import COMMANDS, parse_args  # noqa: E402
from aft_mm.export import operators  # noqa: E402

from .helpers import free_port, load_script  # noqa: E402
from .parallel_data import write_pairs  # noqa: E402

cv2.setNumThreads(0)
# In a fork of a process whose first backward pass is a compiled one, torch refuses a backward pass.
torch.ones(1, requires_grad=True).backward()
# Inductor compiles in the process of a test.
os.environ['TORCHINDUCTOR_COMPILE_THREADS'] = '1'
# Commands that run in the test process do not change its memory allocator.
os.environ['AFT_MM_MALLOC'] = 'system'
ROOT = Path(__file__).parent.parent
# Scripts that tests import, and that import each other.
sys.path += [str(ROOT / 'tools' / name) for name in ('analysis_tools', 'benchmarks')]
SECONDS = 300  # time limit of a run
# The registry first: it supplies the operators of mmcv that its first import needs.
RUN_IMPORTS = ['aft_mm.registry']
RUN_IMPORTS += [
    f'mmpretrain.{name}' for name in ('apis', 'datasets', 'engine', 'evaluation', 'models')
]
RUN_IMPORTS += [f'aft_mm.{name}' for name in ('apis', 'datasets', 'engine', 'evaluation', 'models')]
RUN_IMPORTS += ['mmengine._strategy', 'torch.utils.tensorboard']
# Files that take more than 15 s, the longest first; CONFIG_FILES are one of them.
LONGEST = (
    'test_export/test_graphs.py',
    'test_adversarial/test_exact_resume.py',
    'test_ops/test_triton_interpreter.py',
    'test_export/test_exported_predictions.py',
    'test_config_models.py',
    'test_ops/test_cuda_conv.py',
    'test_models/test_compiled.py',
    'test_ops/test_inductor_offline.py',
    'test_integration.py',
    'test_ops/test_triton_product_compile.py',
    'test_wheel.py',
    'test_ops/test_cuda_nvrtc.py',
    'test_ops/test_compiled_training.py',
    'test_adversarial/test_compile_and_decide.py',
    'test_adversarial/test_resume.py',
    'downstream/test_configs.py',
    'downstream/test_tools.py',
    'downstream/test_hostile_data.py',
    'test_hosts/test_mmcv_ext.py',
    'test_minis.py',
    'test_tools.py',
    'test_ops/test_numerics.py',
    'test_ops/test_triton_simple_compile.py',
    'test_ops/test_triton_step_compile.py',
    'test_layers/test_stale_plan.py',
    'test_layers/test_compiled_conv.py',
    'test_engine/test_distributed.py',
)
# What repeats in breadth what another test shows: `make test` leaves it out, `make test-nightly` runs
# it. Each is a part of the names of tests; `{a|b}` is one of both.
NIGHTLY = (
    'test_a_file_predicts_what_the_checkpoint_does[{boxes-.xml|boxes-.pt2|masks-|classes-.onnx}',
    'test_a_graph_equals_the_model[{conv|conv-loops|conv-maps-any-size|full-any-size}]',
    'test_a_graph_equals_the_model[openvino-conv-maps-any-size]',
    'test_metadata_stay_in_every_format',
    'test_float64_sums_are_finite_in_onnx',
    'test_int8_of_openvino_knows_the_ranges_of_images',
    'test_an_open_graph_takes_grey_pictures_of_any_size',
    'test_a_ctc_graph_equals_the_model_at_any_length[xml]',
    'test_a_loop_without_torch_continues_prompts_like_the_model[softmax]',
    'test_int8_shrinks_the_file_and_rounds_the_outputs[alone]',
    'test_loops_of_openvino_in_bfloat16_round_their_inputs',
    'test_graphs_of_all_runtimes_equal_the_oracle[{line-|column-openvino|volume-}',
    'test_a_layer_is_exported_with_and_without_gradients[{conv-|full-|local-causal|decay]}',
    # Compiled: AdamW and writes through numpy, which stay, are of every other kind.
    'test_a_write_acts[{by_data|by_data_twice|by_storage|by_address|by_scatter|by_gather}-compiled',
    'test_a_write_acts[{in_place|by_swap|by_assigning|by_replacing|by_views|by_averages}-compiled',
    'test_a_write_acts[{by_loading|fused SGD|fused Adagrad}-compiled',
    'test_a_write_acts[{by_numpy-compiled eager|fused AdamW-compiled}]',
    'test_a_change_of_the_module_acts[{set_tau|parametrize}-compiled eager',
    'test_a_change_of_the_module_acts[{hook|parametrize_and_write}-compiled]',
    'test_functional_call_uses_its_parameters[compiled]',
    'test_training_takes_images_of_any_size[{conv-aot_eager|local}',
    'test_inductor_compiles_a_classifier_for_any_size',
    'test_inductor_trains[two layers on two batches]',
    'test_inductor_takes_a_causal_convolution_on_a_picture',
    'test_inductor_writes_forward_and_backward_for_cuda[{local-safe-safe|full-safe|local-2d-fast|conv-fast}',
    'test_inductor_multiplies_bfloat16_with_float32_sums[{normalized|local-training}',
    'test_evaluation_of_conv_has_no_choice[{convolved-difference|dense-additive}]',
    'test_compiles_without_graph_break[aft_local{_learned-1-True|-2-True|_hard-0-False|-1-True}]',
    'test_compiles_without_graph_break[aft_full-1-False]',
    'test_sizes_that_change[{aft_local_learned|aft_full|aft_local|aft_local_hard}-True-None]',
    'test_one_compiled_graph_is_used_for_all_positions_and_weights[{LinearAttention|LSHAttention|AFTLocalHard}]',
    'test_cuda_conv.py::test_matches_oracle[conv-({7,)|9,)|1, 9)|3, 14)|5, 7)|17, 3)}',
    'test_cuda_conv.py::test_matches_oracle[conv-(5, 4)-k=(3, 3)-h=1',
    'test_cuda_conv.py::test_masked_tokens_may_be_nan[{case0-torch.float16|case1-torch.bfloat16}]',
    'test_cuda_conv.py::test_float16_is_multiplied_in_tf32[case{0|2}]',
    'test_cuda_conv.py::test_float32_is_multiplied_in_three_parts[case{2|4|5}]',
    'test_the_check_in_the_interpreter',
    'test_instructions_for_32_x_32',
    'test_every_chip_compiles[{sm_80|sm_89}]',
    # In the interpreter of Triton.
    'test_kernels_match_the_oracle_in_the_interpreter[nightly]',
    'test_triton_{conv|product}.py::test_types[torch.float{32|16}',
    'test_triton_simple.py::{test_types[relu|test_units_of_tiles[8-True]}',
    'test_triton_contract.py::{test_opcheck[full]|test_layouts[local|test_gates[conv|test_gates[full}',
    'test_triton_contract.py::test_padding_may_be_nan_or_inf[{simple relu|local}',
    'test_triton_contract.py::test_compiles_without_graph_break[local 2-d]',
    'test_triton_contract.py::test_unsupported_gradients_give_a_reason[full causal]',
    'test_triton_step.py::test_opcheck[{simple|full|local}',
    'test_triton_step.py::test_{layouts|keys_of_any_size|hidden_keys_have_no_influence}[{local|conv|window}',
    'test_triton_product.py::{test_matches_oracle[full|test_biases_of_any_size[local}',
    # Runs of tasks that differ in the host only.
    'test_a_run_that_stops_resumes_to_the_same_bits[{instances|detection|segmentation|translation}-0]',
    'test_train_kill_resume_test_and_plot[mask-rcnn',
    'test_resume_after_a_kill_is_bit_identical',
    'test_tools.py::test_two_processes_on_a_cpu',
    'test_names_are_no_code[{coco|masks}]',
    'test_the_configs_of_the_guide_train[1-',
    'test_small_models_train_two_iterations_and_are_tested[{upernet|retinanet}-{resnet18|pooling}',
    'test_small_models_train_two_iterations_and_are_tested[mask-rcnn-aft-conv-mini_1xb4-48e-car',
    'test_small_models_train_two_iterations_and_are_tested[retinanet-aft-conv-mini_1xb4-24e{-conv-|_bccd-voc}',
    'test_small_models_train_two_iterations_and_are_tested[upernet-aft-conv-mini_1xb4-2400i-conv-',
    'test_benchmarks.py::{test_runtimes|test_compiled_runtimes}',
    'test_wheel.py::{test_the_notebook_runs_from_the_wheel|test_guides_need_no_clone}',
    'test_another_table_row_trains_and_samples',
    'test_the_weights_arrive_and_the_rest_learns[voc]',
    # Trained weights on hundreds of photos.
    'test_accuracy_with_its_own_mean_and_with_the_usual_one',
    'test_forty_photos_are_enough_with_vit_small_14',
)
# Files that build the models of all configs, which are then loaded and built once.
CONFIG_FILES = 'test_configs', 'test_config_models', 'test_recipes', 'test_runtimes'
MISSING = [name for name in ('mmdet', 'mmseg') if not importlib.util.find_spec(name)]
collect_ignore = ['downstream'] if MISSING else []


def pytest_report_header() -> str | None:
    if not MISSING:
        return None
    return f'tests/downstream is left out without {", ".join(MISSING)}: make downstream'


def pytest_collection_modifyitems(items):
    """Put the longest files first, so that the workers of `make test` end at the same time.

    `make test-fast` leaves them out, and both leave out NIGHTLY.
    """
    order = {ROOT / 'tests' / name: place for place, name in enumerate(LONGEST)}
    nightly = re.escape('\n'.join(NIGHTLY))
    for sign, choice in (r'\{', '(?:'), (r'\|', '|'), (r'\}', ')'), ('\\\n', '|'):
        nightly = nightly.replace(sign, choice)
    nightly = re.compile(nightly)
    for item in items:
        if item.path in order:
            item.add_marker(pytest.mark.slow)
        if nightly.search(item.nodeid):
            item.add_marker(pytest.mark.nightly)
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Run CONFIG_FILES in one worker of `--dist loadfile`, as if they were one file."""
    if config.getvalue('dist') != 'loadfile':
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return 'configs' if file.removesuffix('.py').endswith(CONFIG_FILES) else file

    return Scheduling(config, log)


@pytest.fixture(scope='module', autouse=True)
def frozen_imports():
    """Exempt what is loaded from garbage collection, which datasets and compilers often start."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope='session', autouse=True)
def short_waits():
    """Wait less for workers of data loaders that garbage collection ends.

    It closes their queues before the loader tells them to stop, which otherwise waits 5 s for each.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL', 0.2)
        yield


@pytest.fixture(scope='session', autouse=True)
def short_runs():
    """Leave out of runs what takes half of their time; return the function that plots.

    This is the formatting of configs as text, which stays valid, mmengine's report on the
    environment, and the pictures after a training.
    """
    plot = importlib.import_module('aft_mm.cli.commands.train').plot
    with pytest.MonkeyPatch.context() as patch:
        # The fork of mmengine has no such function.
        patch.setattr(
            'mmengine.config.config.FormatCode', lambda text, **options: (text, True), raising=False
        )
        patch.setattr('mmengine.runner.runner.collect_env', dict)
        patch.setattr('aft_mm.cli.commands.train.plot', lambda *words, out: out)
        yield plot


@pytest.fixture
def with_plots(short_runs, monkeypatch):
    monkeypatch.setattr('aft_mm.cli.commands.train.plot', short_runs)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty working folder, where AFT_MM_DATA is not set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv('AFT_MM_DATA', raising=False)
    return tmp_path


@pytest.fixture(scope='session')
def openvino_loops(tmp_path_factory) -> Callable[[], Path]:
    """Return the loops for OpenVINO, which take ten seconds, compiled once per compiler and run."""
    folder = tmp_path_factory.getbasetemp()
    if 'PYTEST_XDIST_WORKER' in os.environ:
        folder = folder.parent
    compile_loops = operators.compile_for_openvino

    def call():
        library = folder / f'{operators.find_compiler().replace("/", "_")}.so'
        with FileLock(f'{library}.lock'):
            if not library.exists():
                compile_loops(library)
        return library

    return call


@pytest.fixture(scope='session')
def root() -> Path:
    return ROOT


@pytest.fixture(scope='session')
def missing_downstream() -> list[str]:
    return MISSING


@pytest.fixture
def shared_data() -> Path:
    found = ROOT / 'data' if (ROOT / 'data').is_dir() else ROOT.parent / 'shared' / 'data'
    return Path(os.environ.get('AFT_MM_DATA') or found)


@pytest.fixture
def pack(shared_data) -> Callable[[str], Path]:
    """Return the folder of a data pack; the test is skipped where it is missing."""

    def find(name):
        if not (shared_data / name).is_dir():
            pytest.skip(f'the pack {name} is not at {shared_data}')
        return shared_data / name

    return find


@pytest.fixture(scope='session')
def config() -> Callable[[str], str]:
    return lambda name: str(ROOT / 'tests/configs' / f'{name}.py')


def _become(command: list[str], cwd: Path, env: dict[str, str], streams: Path) -> None:
    """Run a script in this fork like ``python script arguments``."""
    for descriptor, name in enumerate(('/dev/null', f'{streams}.out', f'{streams}.err')):
        file = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = (open(i, 'rw'[i > 0]) for i in range(3))
    # Remove the state that tests left in this process.
    gc.freeze()  # objects of the tests are not finalised here
    atexit._clear()
    logging.root.handlers.clear()
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter('ignore', category)
    # Instances are kept per class, and mmdet and mmseg have visualizers of their own.
    managers = [DefaultScope, MMLogger, MessageHub, Visualizer]
    while managers:
        manager = managers.pop()
        manager._instance_dict.clear()
        managers += manager.__subclasses__()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored if the tests run under nohup
    random.seed()
    np.random.seed()
    torch.seed()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [str(Path(command[0]).parent), *filter(None, env['PYTHONPATH'].split(':'))]
    sys.argv = command
    try:
        runpy.run_path(command[0], run_name='__main__')
    finally:
        atexit._run_exitfuncs()


def _run_in_forks(
    command: list[str], cwd: Path, environments: list[dict[str, str]], streams: Path
) -> subprocess.CompletedProcess:
    """Run a script in a fork per environment, which saves the time to import torch and OpenMMLab.

    Return the streams of all forks and the first exit code that is not 0.
    """
    processes = [
        multiprocessing.get_context('fork').Process(
            target=_become, args=(command, cwd, env, Path(f'{streams}_{rank}'))
        )
        for rank, env in enumerate(environments)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + SECONDS
    for process in processes:
        process.join(max(0, end - time.monotonic()))
    if any(process.exitcode is None for process in processes):
        for process in processes:
            process.kill()
        raise subprocess.TimeoutExpired(command, SECONDS)
    output, errors = (
        ''.join(Path(f'{streams}_{rank}.{end}').read_text() for rank in range(len(processes)))
        for end in ('out', 'err')
    )
    code = next((process.exitcode for process in processes if process.exitcode), 0)
    return subprocess.CompletedProcess(command, code, output, errors)


@pytest.fixture(scope='session')
def run(tmp_path_factory) -> Callable[..., subprocess.CompletedProcess]:
    """Run a command of the project in a folder; ``env`` adds to the environment.

    A script runs in a fork of this process, or in several that can form a group with `ranks`. It
    runs in new Python processes with `fresh`, for tests of the start itself, and on machines with a
    CUDA device, which a fork cannot use.
    """
    streams = tmp_path_factory.mktemp('streams')
    numbers = itertools.count()
    for module in RUN_IMPORTS:
        importlib.import_module(module)

    def call(*command, cwd, env=None, fresh=False, ranks=None):
        paths = [str(ROOT / 'tests/configs'), os.environ.get('PYTHONPATH', '')]
        port = str(free_port())
        environment = {
            **os.environ,
            'PYTHONPATH': os.pathsep.join(filter(None, paths)),
            'PORT': port,
            'MASTER_PORT': port,
            'PYTHON': sys.executable,
            'OMP_NUM_THREADS': '1',
            **(env or {}),
        }
        command = [str(part) for part in command]
        if command[0].endswith('.py'):
            if not (fresh or torch.cuda.is_available()):
                each = [environment]
                if ranks:
                    group = dict(environment, MASTER_ADDR='127.0.0.1', WORLD_SIZE=str(ranks))
                    each = [
                        dict(group, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(ranks)
                    ]
                return _run_in_forks(command, cwd, each, streams / str(next(numbers)))
            if ranks:
                launch = '-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={ranks}'
                command = [*launch, *command]
            command = [sys.executable, *command]
        return subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=SECONDS
        )

    return call


class Command:
    """A command of aft_mm in this process, with `main`, `parse_args` and the rest of its module."""

    def __init__(self, name: str):
        self.name = name.replace('_', '-')
        self.module = importlib.import_module(f'aft_mm.{COMMANDS[self.name]}')

    def parse_args(self, words: list[str]) -> argparse.Namespace:
        return parse_args(self.name, words)

    def main(self, words: list[str]) -> None:
        """Run the command without the checks of its files that come first."""
        self.module.run(self.parse_args(words))

    def __getattr__(self, attribute: str):
        return getattr(self.module, attribute)


@pytest.fixture
def tool(root, monkeypatch) -> Callable[[str], ModuleType | Command]:
    monkeypatch.setenv('LOCAL_RANK', '0')
    monkeypatch.syspath_prepend(str(root / 'tests/configs'))

    def load(name):
        if '/' not in name and name != 'launch':
            return Command(name)
        monkeypatch.syspath_prepend(str((root / f'tools/{name}.py').parent))
        return load_script(f'tools/{name}')

    return load


@pytest.fixture(scope='session')
def untrained(tmp_path_factory) -> dict[str, tuple[str, str]]:
    folder = tmp_path_factory.mktemp('untrained')
    found = {}
    for name in ('tiny_text', 'tiny_pixels', 'tiny_super_resolution', 'tiny_clouds'):
        config = Config.fromfile(ROOT / f'tests/configs/{name}.py', import_custom_modules=False)
        config.pop('custom_imports')  # hooks of the tests, which users do not have
        config.dump(folder / f'{name}.py')
        torch.manual_seed(0)
        model = MODELS.build(dict(config.model, type='aft_mm.AutoregressiveModel'))
        if model.encoder is not None:  # otherwise the source hardly changes the samples
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.4)
        else:
            with torch.no_grad():  # logits that differ enough for the temperature to matter
                model.head.weight.mul_(100)
        torch.save(dict(state_dict=model.state_dict(), meta={}), folder / f'{name}.pth')
        found[name] = str(folder / f'{name}.py'), str(folder / f'{name}.pth')
    return found


@pytest.fixture(scope='module')
def resolver(untrained):
    from aft_mm.apis import SuperResolver

    return SuperResolver(*untrained['tiny_super_resolution'], device='cpu')


@pytest.fixture(scope='module')
def pairs(tmp_path_factory) -> Path:
    """Folder with the artificial language pair of parallel_data.py."""
    write_pairs(folder := tmp_path_factory.mktemp('pairs'))
    return folder


@pytest.fixture(scope='session')
def tiny_classifier(tmp_path_factory) -> tuple[str, str]:
    """Config and checkpoint of a classifier of 8 x 12 RGB images, 4 x 6 tokens, 5 classes."""
    folder = tmp_path_factory.mktemp('classifier')
    config = Config.fromfile(ROOT / 'tests/configs/tiny_images.py', import_custom_modules=False)
    config.custom_imports.imports = ['aft_mm.registry']
    config.pop('default_hooks')
    config.pop('custom_hooks')
    config.model.backbone.img_size = (8, 12)
    config.model.backbone.token_mixer.kernel_size = (3, 5)
    config.model.head.num_classes = config.data_preprocessor.num_classes = 5
    config.test_dataloader.dataset.pipeline = [
        dict(type='LoadImageFromFile'),
        dict(type='Resize', scale=(12, 8)),
        dict(type='PackInputs'),
    ]
    config.dump(folder / 'classifier.py')
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        model = MODELS.build(config.model)
    for parameter in model.parameters():  # visibly different from 0
        torch.nn.init.normal_(parameter, std=0.5)
    meta = dict(dataset_meta=dict(classes=('ant', 'bee', 'cat', 'dog', 'elk')))
    torch.save(dict(state_dict=model.state_dict(), meta=meta), folder / 'classifier.pth')
    return str(folder / 'classifier.py'), str(folder / 'classifier.pth')


@pytest.fixture(scope='session')
def digits_classifier(tmp_path_factory) -> tuple[str, str]:
    """Config and checkpoint of an untrained AFT-conv on digits whose biases are not 0."""
    folder = tmp_path_factory.mktemp('digits_classifier')
    config = Config.fromfile(ROOT / 'tests/configs/tiny.py', import_custom_modules=False)
    config.pop('custom_imports')
    config.dump(folder / 'tiny.py')
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        model = MODELS.build(config.model)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    torch.save(dict(state_dict=model.state_dict(), meta={}), folder / 'tiny.pth')
    return str(folder / 'tiny.py'), str(folder / 'tiny.pth')
