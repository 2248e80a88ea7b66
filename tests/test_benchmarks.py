"""Each tool of tools/benchmarks: help, a short run, and wrong results, which are not timed."""

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import benchmark_attention
import benchmark_iterations
import benchmark_models
import benchmark_ops
import benchmark_runtimes
import benchmark_sampling
import decoders
import matplotlib.image
import measuring
import parity
import pytest
import torch
import training_step
from op_cases import CASES, sized
from rivals import RIVALS, Rival
from torch import nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from aft_mm.cli.main import parse_args
from aft_mm.ops import eager, reference
from aft_mm.ops.cases import conv
from aft_mm.ops.triton.availability import KERNELS

from .errors import refuses
from .generation_models import stack
from .helpers import ROOT

TOOLS = ROOT / 'tools' / 'benchmarks'
COMMON = ['--device', 'cpu', '--threads', '1', '--rounds', '1']
PROGRAMS = [
    *('benchmark_attention', 'benchmark_iterations', 'benchmark_models'),
    *(
        'benchmark_ops',
        'benchmark_runtimes',
        'benchmark_sampling',
        'benchmark_tiles',
        'dry_run',
    ),
    *('training_run', 'training_step'),
]


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    monkeypatch.setenv('AFT_MM_BACKEND', 'eager')
    for tool in (benchmark_attention, benchmark_models, benchmark_ops):
        monkeypatch.setattr(tool, 'in_fresh_process', lambda call, *args: 1.0)
    monkeypatch.setattr(training_step, 'in_fresh_process', lambda call, *args: 1.0)


def rows_of(path):
    content = json.loads(path.read_text())
    about = content['environment']
    assert about['versions']['torch'] and {'commit', 'device_name', 'loops'} <= about.keys()
    assert about['threads'] == torch.get_num_threads()
    assert str(path.parent) not in path.read_text()
    return content['rows']


def scaled(function):
    return lambda *args, **options: 1.01 * function(*args, **options)


@pytest.mark.parametrize('name', PROGRAMS)
def test_help(name, capsys):
    with pytest.raises(SystemExit, match='0'):
        importlib.import_module(name).main(['--help'])
    assert 'usage: ' in capsys.readouterr().out


def test_ops(tmp_path, monkeypatch, capsys):
    path = tmp_path / 'out.json'
    options = ['--backends', 'eager', 'triton', '--json', str(path), *COMMON]
    assert benchmark_ops.main(['--cases', 'small-[fs]*', '--dtype', 'bfloat16', *options]) == 0
    rows = {(row['case'], row['form'], row['mode']): row for row in rows_of(path)}
    row = rows['small-full', 'eager', 'forward+backward']
    assert row['status'] == 'ok' and row['milliseconds'] > 0
    assert max(row['errors'].values()) < 2e-2
    assert 'cuda tensors' in rows['small-full', 'triton', 'forward']['reason']
    assert rows['small-full', 'softmax', 'forward']['compared'] is False
    right = RIVALS['dense-local'].make
    with monkeypatch.context() as patch:
        patch.setitem(RIVALS, 'dense-local', Rival(lambda *given: scaled(right(*given)), True))
        assert benchmark_ops.main(['--cases', 'small-local', '--check', *options]) == 0
    rival = next(row for row in rows_of(path) if row['form'] == 'dense-local')
    assert rival['status'] == 'wrong'
    monkeypatch.setattr(eager, 'aft_simple', scaled(eager.aft_simple))
    assert benchmark_ops.main(['--cases', 'small-simple', *options]) == 1
    for row in rows_of(path):
        assert row['form'] == 'triton' or row['status'] == 'wrong' and 'milliseconds' not in row
    assert 'wrong: output' in capsys.readouterr().out


def test_every_case_of_ops_matches_its_op():
    for case in CASES.values():
        with torch.device('meta'):
            tensors = [torch.empty(shape) for shape in case.input_shapes]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr('aft_mm.ops.functional._run', lambda op, value, *tensors, **options: op)
            assert case(*tensors) == case.op
        assert set(case.rivals) <= set(benchmark_ops.RIVALS)


def test_the_time_on_a_device_is_that_of_its_kernels():
    def event(name, start, end, device=DeviceType.CUDA, **more):
        return FunctionEvent(0, name, 0, start, end, device_type=device, use_device='cuda', **more)

    events = [
        event('aten::mm', 0, 500, DeviceType.CPU),
        event('gemm', 100, 110),
        event('gate', 110, 112.5),
        event('gate', 120, 122.5),
        event('Context Sync', 0, 900),
        event('step 1', 90, 140, is_user_annotation=True),
    ]
    assert measuring.kernel_times(events) == pytest.approx({'gemm': 10e-6, 'gate': 5e-6})
    with pytest.raises(RuntimeError, match='the profiler found no kernel'):
        measuring.kernel_times(events[:1])


def test_models(tmp_path, monkeypatch):
    path = tmp_path / 'out.json'
    names, more = ['aft-tiny-h32-k3', 'bound-tiny-h32-k3'], ['--size', '32', '--batch', '1']
    if importlib.util.find_spec('timm'):
        names.append('deit-tiny')
    benchmark_models.main(['--models', *names, *more, *COMMON, '--json', str(path)])
    rows = {row['model']: row for row in rows_of(path)}
    assert rows['aft-tiny-h32-k3']['images_per_second'] > 0
    assert 'speed_vs_bound' in rows['aft-tiny-h32-k3']
    more[1:2] = ['32', '64']
    assert rows['aft-tiny-h32-k3']['wall_images_per_second'] > 0
    more += ['--train', '--clock', 'cpu']
    benchmark_models.main(['--models', *names[:2], *more, *COMMON, '--json', str(path)])
    assert not any(key.startswith('wall_') for row in rows_of(path) for key in row)
    monkeypatch.setattr(eager, 'aft_conv', scaled(eager.aft_conv))
    with pytest.raises(SystemExit, match='aft-tiny-h32-k3 at 32 px .*: not timed'):
        benchmark_models.main(['--models', names[0], *more, *COMMON])


def test_long_sequences_are_compared_with_eager_in_float64(monkeypatch):
    case = sized(conv((5, 7), (3, 3), 2, channels=4), 2)
    tensors = case.tensors(torch.float32, 'cpu')
    exact = parity.Oracle.of(case, tensors)
    monkeypatch.setattr(parity, 'MOST_ORACLE_TOKENS', 34)
    monkeypatch.setattr(reference, 'aft_conv', None)
    long = parity.Oracle.of(case, tensors)
    torch.testing.assert_close(long.output, exact.output)
    assert long.output.dtype == torch.float64
    for found, expected in zip(long.gradients, exact.gradients, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.nightly
def test_runtimes(tmp_path, monkeypatch):
    assert benchmark_runtimes.error_reason('bfloat16', 1e-6).startswith('ran in float32')
    assert benchmark_runtimes.error_reason('int8', 1e-6).startswith('has no int8 product')
    path, names = tmp_path / 'out.json', ['bound-tiny-h32-k3', 'aft-tiny-h32-k3']
    monkeypatch.setattr(benchmark_runtimes, 'in_fresh_process', lambda *args: dict(peak_mib=1.0))
    monkeypatch.setattr(benchmark_runtimes, 'line', str)
    more = ['--size', '32', '--batch', '2', '--runtimes', 'eager', 'onnxruntime', *COMMON]
    more += ['--dtype', 'float32', 'bfloat16']
    monkeypatch.setitem(benchmark_runtimes.TOLERANCE, 'bfloat16', 0)
    benchmark_runtimes.main(['--models', *names, *more, '--json', str(path)])
    rows = rows_of(path)
    reasons = {(row['runtime'], row['dtype']): row.get('reason') for row in rows if 'model' in row}
    assert reasons['eager', 'float32'] is None
    assert reasons['eager', 'bfloat16'].startswith('wrong by')
    if importlib.util.find_spec('onnxruntime'):
        assert reasons['onnxruntime', 'float32'] is None
        assert reasons['onnxruntime', 'bfloat16'] == 'ONNX Runtime has no bfloat16 on a CPU'
    best = {row['best_of']: row for row in rows if row.get('of') == 'float32'}
    assert best[names[0]]['speed_vs_bound-tiny-h32-k3'] == 1
    assert best[names[1]]['images_per_second'] > 0


def test_a_runtime_that_crashes_gets_a_reason(tmp_path, monkeypatch):
    path = tmp_path / 'out.json'
    fresh = measuring.in_fresh_process
    monkeypatch.setattr(benchmark_runtimes, 'in_fresh_process', lambda *args: fresh(os.abort))
    more = ['--size', '32', '--batch', '1', '--runtimes', 'eager', '--dtype', 'float32', *COMMON]
    benchmark_runtimes.main(['--models', 'aft-tiny-h32-k3', *more, '--json', str(path)])
    (row,) = rows_of(path)
    assert row['reason'].startswith('BrokenProcessPool')


@pytest.mark.nightly
@pytest.mark.slow
def test_compiled_runtimes(tmp_path, monkeypatch):
    path = tmp_path / 'out.json'

    def build(name, size, dtype):
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 8, 4, 4), nn.Flatten(), nn.Linear(8 * (size // 4) ** 2, 5)
        return nn.Sequential(*layers).eval().to(getattr(torch, dtype))

    monkeypatch.setattr(benchmark_runtimes, 'build', build)
    monkeypatch.setattr(benchmark_runtimes, 'in_fresh_process', lambda *args: dict(peak_mib=1.0))
    monkeypatch.setattr(benchmark_runtimes, 'line', str)
    more = ['--size', '32', '--batch', '2', '--dtype', 'bfloat16', *COMMON]
    more += ['--models', 'deit-tiny', '--runtimes', 'compiled', 'aoti', '--json', str(path)]
    benchmark_runtimes.main(more)
    rows = {row['runtime']: row for row in rows_of(path) if 'model' in row}
    for runtime in ('compiled', 'aoti'):
        row = rows[runtime]
        assert 'reason' not in row, row
        assert benchmark_runtimes.LEAST_ERROR < row['error'] < 5e-2
        assert row['images_per_second'] > 0


def test_attention(tmp_path, monkeypatch):
    path, png = tmp_path / 'out.json', tmp_path / 'out.png'
    arguments = ['--mixers', 'linear', '--dims', '16', '--heads', '2', '--lengths', '64', '128']
    arguments += ['--tokens', '128', *COMMON]
    benchmark_attention.main([*arguments, '--json', str(path), '--png', str(png)])
    assert matplotlib.image.imread(png).std() > 0.05
    assert [(row['length'], row['ms'] > 0) for row in rows_of(path)] == [(64, True), (128, True)]
    monkeypatch.setattr(eager, 'linear_attention', scaled(eager.linear_attention))
    with pytest.raises(SystemExit, match='linear step by step'):
        benchmark_attention.main(arguments)


def test_lengths_that_are_left_out_are_named(monkeypatch, capsys):
    def make(name, length):
        def call():
            if name == 'large' and length > 64:
                raise torch.OutOfMemoryError

        call.seconds = 1.0 if name == 'slow' else 0.0
        return call

    monkeypatch.setattr(benchmark_attention, 'seconds', lambda call, *rest: call.seconds)
    monkeypatch.setattr(
        benchmark_attention, 'interleaved', lambda calls, *rest: dict.fromkeys(calls, [1.0])
    )
    about = dict(lengths=[64, 128, 256], mixers=['slow', 'large'], patience=2.0)
    args = SimpleNamespace(**about, rounds=1, device='cpu', clock='wall')
    assert benchmark_attention.sweep(make, args) == {('slow', 64): 1.0, ('large', 64): 1.0}
    assert capsys.readouterr().err.splitlines() == [
        'slow of 128 tokens is left out: it would take 4 s, --patience is 2',
        'large of 128 tokens is left out: out of memory',
        'slow of 256 tokens is left out: it would take 16 s, --patience is 2',
        'large of 256 tokens is left out: a shorter one was',
    ]
    (line,) = benchmark_attention.summary([dict(mixer='slow', length=64, ms=1.0)])
    assert line.startswith('slow ') and line.endswith('no slope: one length')


def test_sampling(tmp_path, monkeypatch):
    from aft_mm.models import AutoregressiveModel, SequenceDecoder

    def build(data, mixer, device):
        torch.manual_seed(0)
        embedding = dict(type='aft_mm.TokenEmbedding', vocab_size=256)
        decoder = stack('SequenceDecoder', embedding=embedding, grid=(120,))
        head = dict(type='aft_mm.LogisticMixtureHead', embed_dims=8, num_channels=1)
        return AutoregressiveModel(decoder, head).eval()

    monkeypatch.setattr(benchmark_sampling, 'build', build)
    path = tmp_path / 'out.json'
    arguments = ['--mixers', 'aft-simple', '--batch', '2', '--images', '1', *COMMON]
    benchmark_sampling.main([*arguments, '--json', str(path)])
    rows = {row['form']: row for row in rows_of(path)}
    assert rows['steps']['seconds'] > 0 and rows['stateless']['seconds'] is None
    step = SequenceDecoder.step

    def wrong(self, token, state):
        hidden, state = step(self, token, state)
        return hidden * 1.01, state

    monkeypatch.setattr(SequenceDecoder, 'step', wrong)
    with pytest.raises(SystemExit, match='aft-simple by steps is wrong by .* not timed'):
        benchmark_sampling.main(arguments)


def test_training_step(tmp_path):
    path = tmp_path / 'out.json'
    arguments = ['--tokens', '40', '--dims', '16', '--layers', '1', '--window', '8']
    training_step.main([*arguments, *COMMON, '--json', str(path)])
    rows = {row['model']: row for row in rows_of(path)}
    assert set(rows) == {'aft-local-8', 'softmax', 'dense-aft-local-8', 'bound'}


@pytest.mark.parametrize('name', ['aft-local', 'aft-local-0', 'resnet', 'aft_mm.AFTLocal(5)'])
def test_an_unknown_mixer_is_refused(name):
    refuses('must be one of aft-simple, .* or a registered mixer', decoders.mixer, name, heads=2)


def test_two_configs_of_one_name_are_refused(capsys):
    with pytest.raises(SystemExit, match='2'):
        benchmark_iterations.main(['a/x.py', 'b/x.py', *COMMON])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith('CONFIG: must have different file names, got x twice')


def test_a_wrong_argument_is_a_one_line_error(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 0)
    for arguments, message in [
        (['--device', 'cuda'], "--device: must be one of the 0 GPUs found, got 'cuda'"),
        (['--rounds', '0'], "--rounds: must be a whole number of at least 1, got '0'"),
        (['--device', 'cpu', '--backends', 'tritn'], "must be among cuda, triton, .*, got 'tritn'"),
    ]:
        with pytest.raises(SystemExit, match='2'):
            benchmark_ops.main(arguments)
        last = capsys.readouterr().err.splitlines()[-1]
        assert re.search(message, last), last


def test_the_commands_for_a_gpu_are_accepted_and_a_failing_one_is_repeated(tmp_path):
    tools = tmp_path / 'bin'
    tools.mkdir()
    for name in ('bash', 'dirname', 'env', 'mkdir', 'realpath', 'rm', 'tail', 'timeout', 'touch'):
        (tools / name).symlink_to(shutil.which(name))
    for name in ('python', 'compute-sanitizer'):
        (tools / name).write_text(
            '#!/bin/bash\n(IFS=$\'\\t\'; echo "$AFT_MM_BACKEND$IFS$*" >>calls)\n[[ $* != *"$FAILS"* ]]'
        )
        (tools / name).chmod(0o755)
    (tmp_path / 'tools/benchmarks').mkdir(parents=True)
    script = shutil.copy(TOOLS / 'gpu.sh', tmp_path / 'tools/benchmarks')
    out = tmp_path / 'out'

    def run(fails, out=out):
        environment = dict(PATH=str(tools), FAILS=fails)
        done = subprocess.run([script, out], env=environment, capture_output=True, text=True)
        calls = (tmp_path / 'calls').read_text().splitlines()
        (tmp_path / 'calls').unlink()
        found, *calls = [call.split('\t') for call in calls]
        assert 'torch.cuda.is_available' in found[-1]
        return done, calls

    (out / 'training').mkdir(parents=True)
    (out / 'step-3072.json').touch()
    done, first = run('small-conv')
    assert done.returncode == 1 and not list(out.glob('*.json')) and not (out / 'training').exists()
    (out / 'step-3072.json').touch()
    done, second = run('none')
    assert (done.returncode, second) == (0, [call for call in first if 'small-conv' in call])
    assert (out / 'step-3072.json').exists()
    done, calls = run('cuda.is_available', tmp_path / 'other')
    assert (done.returncode, calls) == (1, [])
    assert done.stderr == 'Error: torch finds no CUDA device to measure\n'
    (tools / 'compute-sanitizer').unlink()
    done, calls = run('none', tmp_path / 'other')
    assert done.returncode == 0 and 'cuda-memcheck: skipped without' in done.stdout
    assert len(calls) == len([call for call in first if 'memcheck' not in call])
    backends = {}
    for backend, *words in first:
        for option in {'--json', '--work-dir'} & set(words):
            backends[Path(words[words.index(option) + 1]).stem] = backend
    with_cuda = {name for name in backends if re.fullmatch('(models-.*|training)-cuda', name)}
    assert len(with_cuda) == 5
    assert {name for name, backend in backends.items() if backend} == with_cuda
    assert {backends[name] for name in with_cuda} == {'cuda,triton,eager'}
    first = [words for _, *words in first]
    checked = [op for call in first if '--kernels' in call for op in call[4:]]
    assert sorted(checked) == sorted(KERNELS)
    for words in first:
        tools = [i for i, word in enumerate(words) if '/benchmarks/' in word]
        if tools:
            module = importlib.import_module(Path(words[tools[0]]).stem)
            args = module.parse_args([*words[tools[0] + 1 :], '--device', 'cpu'])
            assert args.json.parent == tmp_path / 'out'
        elif 'tools/train.py' in words:
            parse_args('train', words[words.index('tools/train.py') + 1 :])
    assert len(first) > 30


def test_training_run(run, tmp_path):
    config = ROOT / 'configs/language_modeling/aft-simple-mini_1xb16-6e_enwik8-t256.py'
    (tmp_path / 'enwik8').mkdir()
    (tmp_path / 'enwik8' / 'enwik8').write_bytes(bytes(range(32, 112)) * 250)
    done = run(
        TOOLS / 'training_run.py',
        config,
        '--iterations',
        12,
        '--amp',
        '--json',
        'out.json',
        '--work-dir',
        'run',
        '--cfg-options',
        'train_dataloader.batch_size=2',
        'model.decoder.grid=(32,)',
        'train_dataloader.dataset.context_length=32',
        cwd=tmp_path,
        env=dict(AFT_MM_DATA=str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    (row,) = rows_of(tmp_path / 'out.json')
    assert row['iterations'] == 12 and 1 < row['last_loss'] < row['first_loss'] < 8
