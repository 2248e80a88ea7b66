"""What tools/benchmarks counts, measures and refuses."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from aft_mm import ops
from aft_mm.ops import eager
from aft_mm.ops.geometry import hard_mask, kernel_index, near_mask

TOOLS = Path(__file__).parents[1] / 'tools' / 'benchmarks'
sys.path.insert(0, str(TOOLS))

import benchmark_ops  # noqa: E402
import parity  # noqa: E402
import rivals  # noqa: E402
from memory import added_peak, in_fresh_process  # noqa: E402
from op_cases import CASES, Case  # noqa: E402
from op_costs import compulsory_bytes, operations, weighted_pairs  # noqa: E402


def indices(tokens):
    return torch.arange(tokens)[:, None], torch.arange(tokens)[None]


@pytest.mark.parametrize('op, options, parameters, expected', [
    # B = 2, T = 3, D = 4. Keys: exp and product; epilogue: quotient, sigmoid, gate.
    ('aft_simple', dict(causal=True), [], 24 * (2 + 3) + 24 * 2),
    # 9 exponentials of w, and 9 pairs in 2 sequences and 4 channels of numerator and denominator.
    ('aft_full', {}, [(3, 3)], 24 * 5 + 9 + 2 * 9 * 2 * 4 * 2),
    ('aft_full', dict(causal=True), [(3, 3)], 24 * 5 + 6 + 2 * 6 * 2 * 4 * 2),
    # 00 10 11 21 22 are near; u·v of rank 5 and exp for each, and a running sum for the rest.
    ('aft_local', dict(window=2, causal=True), [(3, 5), (3, 5)],
     24 * 5 + 5 * (10 + 1) + 2 * 5 * 2 * 8 + 2 * 3 * 2 * 8),
    ('aft_local_hard', dict(window=2), [], 24 * 5 + 5 * 2 * 8),
    # Numerator and, for all channels at once, the sum of the weights; the sum of the keys' terms
    # and its product with that of the weights.
    ('aft_local_learned', dict(window=2, causal=True), [(3, 5), (3, 5)],
     24 * 5 + 5 * (10 + 1) + 2 * 5 * 2 * 5 + 2 * 3 * 2 * 5 + 24 * 2),
])  # fmt: skip
def test_operations_are_those_of_a_hand_count(op, options, parameters, expected):
    shapes = [(2, 3, 4)] * 3 + parameters
    assert operations(op, shapes, options) == expected
    assert operations(op, shapes, options, training=True) == 3 * expected


def test_operations_of_a_convolution_are_those_of_a_hand_count():
    # A grid of 1 x 3, one key channel for 4 channels, 3 x 3 taps: 7 pairs.
    shapes = [(2, 3, 4), (2, 3, 1), (2, 3, 4), (1, 3, 3)]
    expected = 2 * 3 * (1 + 4) + 24 * 3 + 9 + 2 * 7 * 2 * (4 + 1)
    assert operations('aft_conv', shapes, dict(grid=(1, 3), global_connectivity=False)) == expected
    assert operations('aft_conv', shapes, dict(grid=(1, 3))) == expected + 2 * 2 * 3 * (4 + 1)


def test_biases_are_measured_in_the_type_that_autocast_leaves_them():
    case = CASES['small-local-normalized']
    kinds = [x.dtype for x in case.inputs(torch.bfloat16, 'cpu')]
    assert kinds == [torch.bfloat16] * 3 + [torch.float32] * 2
    assert {x.dtype for x in case.inputs(torch.float64, 'cpu')} == {torch.float64}


@pytest.mark.parametrize('window', [1, 5, 40])
@pytest.mark.parametrize('causal', [False, True])
def test_near_pairs_are_those_of_the_mask(window, causal):
    for grid, size in (((35,), window), ((5, 7), window), ((7, 5), (2, window))):
        expected = near_mask(*indices(35), size, grid)
        expected = int((expected.tril() if causal else expected).sum())
        shapes = [(1, 35, 4)] * 3
        options = dict(window=size, grid=grid, causal=causal)
        assert weighted_pairs('aft_local', shapes, options) == expected


@pytest.mark.parametrize('kernel', [(1, 3), (5, 3), (13, 9)])
@pytest.mark.parametrize('causal', [False, True])
def test_kernel_pairs_are_those_of_the_index(kernel, causal):
    inside = kernel_index(*indices(35), kernel, (5, 7)) >= 0
    expected = int((inside.tril() if causal else inside).sum())
    shapes = [(1, 35, 4)] * 3 + [(4, *kernel)]
    assert weighted_pairs('aft_conv', shapes, dict(grid=(5, 7), causal=causal)) == expected


@pytest.mark.parametrize(
    'grid, window',
    [((35,), 1), ((35,), 6), ((35,), 50), ((5, 7), (2, 4)), ((7, 5), (4, 6)), ((7, 5), 20)],
)
def test_pairs_of_a_hard_window_are_those_of_the_mask(grid, window):
    expected = int(hard_mask(*indices(35), window, grid, True).sum())
    shapes = [(1, 35, 4)] * 3
    assert weighted_pairs('aft_local_hard', shapes, dict(window=window, grid=grid)) == expected


def test_bytes_are_those_of_a_hand_count():
    inputs = [torch.empty(2, 3, 4, dtype=torch.bfloat16)] * 3 + [torch.empty(5, 7)]
    read, written = 3 * 48 + 140, 48
    assert compulsory_bytes(inputs, inputs[0], training=False) == read + written
    # Once more the inputs and the gradient of the output, and the gradients of the inputs.
    assert compulsory_bytes(inputs, inputs[0], training=True) == 3 * read + 2 * written


def test_peak_memory_of_a_cpu_counts_what_was_freed_before():
    def use():
        torch.ones(8, 2**20).sum()

    use()
    assert 31 <= added_peak(use) < 64


@pytest.mark.parametrize('case', CASES.values(), ids=CASES)
def test_every_case_is_a_call_that_the_op_takes(case):
    with torch.device('meta'):
        tensors = [torch.empty(shape) for shape in case.shapes]
    # The checks come before the backend, which has no meta device to compute on.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('aft_mm.ops.functional._run', lambda op, value, *tensors, **options: op)
        assert case(*tensors) == case.op
    assert set(case.all_options) >= {'causal', 'key_mask', 'gate'}
    assert set(case.rivals) <= set(rivals.RIVALS)
    assert case.baseline is None or CASES[case.baseline].baseline in (None, case.baseline)


@pytest.mark.parametrize('heads', [1, 2, 3, 6, 12])
@pytest.mark.parametrize('largest', [0, 10**9])
def test_the_sampled_oracle_agrees_with_a_right_op(heads, largest, monkeypatch):
    monkeypatch.setitem(parity.LARGEST_PRODUCT, 'cpu', largest)
    weight = ((heads, 3, 5),)
    case = Case('aft_conv', 3, 35, 12, dict(grid=(5, 7)), weight, heads)
    tensors = case.inputs(torch.float32, 'cpu')
    oracle = parity.Oracle.of(case, tensors)
    assert len(oracle.sample.channels) == (max(2, heads if heads > 1 else 12) if largest else 2)
    assert oracle.sample.sequences == [0, 2]
    errors = oracle.errors(case, tensors)
    assert len(errors) == 5 and max(errors.values()) < parity.TOLERANCE[torch.float32]


def wrong_output(query, key, value, **options):
    # Only the last channel, by a little.
    y = eager_simple(query, key, value, **options)
    return torch.cat([y[..., :-1], y[..., -1:] * 1.001], -1)


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.001


def wrong_gradient(query, key, value, **options):
    return eager_simple(query, WrongGradient.apply(key), value, **options)


def not_a_number(query, key, value, **options):
    return eager_simple(query, key, value, **options) * torch.nan


eager_simple = eager.aft_simple


@pytest.mark.parametrize(
    'wrong, part',
    [(wrong_output, 'output'), (wrong_gradient, 'gradient of key'), (not_a_number, 'output')],
)
def test_a_wrong_op_is_refused(wrong, part, monkeypatch, tmp_path, capsys):
    backends = ['--backends', 'eager', 'reference']
    monkeypatch.setattr(eager, 'aft_simple', wrong)
    path = tmp_path / 'out.json'
    common = ['--device', 'cpu', '--rounds', '1', '--threads', '1', '--json', str(path)]
    assert benchmark_ops.main(['--cases', 'small-simple', *backends, *common]) == 1
    rows = {(row['form'], row['mode']): row for row in json.loads(path.read_text())['rows']}
    for mode in ('forward', 'forward+backward'):
        assert rows['eager', mode]['status'] == 'wrong'
        assert part in rows['eager', mode]['reason']
        assert not {'milliseconds', 'speed_over', 'peak_mib'} & set(rows['eager', mode])
        # The backend that is right is timed and compared with nothing.
        assert rows['reference', mode]['milliseconds'] > 0
        assert rows['reference', mode]['speed_over'] == {}
    assert f'wrong: {part}' in capsys.readouterr().out


def test_the_command_line(tmp_path):
    command = [sys.executable, TOOLS / 'benchmark_ops.py', '--device', 'cpu', '--threads', '1']
    path = tmp_path / 'out.json'
    done = subprocess.run(
        [*command, '--cases', 'small-[fc]*', '--rounds', '1', '--json', path, '--backends',
         'eager', 'triton', '--dtype', 'bfloat16'],
        capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    content = json.loads(path.read_text())
    about, rows = content['environment'], content['rows']
    assert about['device_name'] and about['versions']['torch'] and 'commit' in about
    assert str(tmp_path) not in path.read_text()
    # float32 is float32 on a GPU, where cuDNN would take TF32 by default.
    assert about['tf32'] == dict(matmul=False, cudnn=False)
    # A log is no terminal.
    assert 'round' not in done.stderr
    assert about['rates']['bfloat16']['copy_bytes_per_second'] > 0
    found = {(row['case'], row['form'], row['mode']): row for row in rows}
    assert len(found) == len(rows) == 2 * (4 + 2)
    for case in ('small-full', 'small-conv'):
        row = found[case, 'eager', 'forward']
        assert row['status'] == 'ok' and row['milliseconds'] > 0 and row['bytes'] > 0
        assert row['wall_milliseconds'] == row['milliseconds'] and 'kernels' not in row
        assert max(row['errors'].values()) < 2e-2 and row['peak_mib'] >= 0
        assert 'serves cuda tensors' in found[case, 'triton', 'forward']['reason']
    assert found['small-full', 'softmax', 'forward']['compared'] is False
    assert set(found['small-full', 'eager', 'forward']['speed_over']) >= {'softmax'}
    peer = found['small-full', 'aft-pytorch-full', 'forward']
    if importlib.util.find_spec('aft_pytorch') is None:
        assert peer['reason'] == 'aft-pytorch is not installed: pip install aft-pytorch'
    else:
        assert peer['milliseconds'] > 0

    done = subprocess.run([*command, '--list'], capture_output=True, text=True)
    assert done.stdout.split() == list(CASES)
    done = subprocess.run([*command, '--cases', 'no'], capture_output=True, text=True)
    assert done.returncode == 2 and "got 'no'" in done.stderr


def test_a_check_times_nothing(monkeypatch, tmp_path, capsys):
    def unasked(*args):
        raise AssertionError('timed')

    monkeypatch.setattr(benchmark_ops, 'both_clocks', unasked)
    monkeypatch.setattr(benchmark_ops, 'device_rates', unasked)
    path = tmp_path / 'out.json'
    arguments = ['--device', 'cpu', '--backends', 'eager', '--check', '--json', str(path)]
    assert benchmark_ops.main([*arguments, '--cases', 'small-[sf]*']) == 0
    rows = {(row['case'], row['form']): row for row in json.loads(path.read_text())['rows']}
    assert max(rows['small-simple', 'eager']['errors'].values()) < 2e-5
    assert rows['small-full', 'softmax']['compared'] is False
    assert not any('milliseconds' in row for row in rows.values())
    assert 'as the oracle' in capsys.readouterr().out
    monkeypatch.setattr(eager, 'aft_simple', wrong_gradient)
    assert benchmark_ops.main([*arguments, '--cases', 'small-simple']) == 1


def test_kernels_are_listed_by_their_time():
    found = benchmark_ops.microseconds({'short': 1e-6, 'long': 2.5e-6})
    assert list(found.items()) == [('long', 2.5), ('short', 1.0)]


def test_backends_that_serve_nothing_end_the_run_before_anything_is_timed(monkeypatch, tmp_path):
    def unasked(*args):
        raise AssertionError('timed')

    monkeypatch.setattr(benchmark_ops, 'both_clocks', unasked)
    monkeypatch.setattr(benchmark_ops, 'device_rates', unasked)
    arguments = ['--device', 'cpu', '--cases', 'small-[sf]*', '--json', str(tmp_path / 'out.json')]
    with pytest.raises(SystemExit, match='no backend serves any.*triton: serves cuda tensors'):
        benchmark_ops.main([*arguments, '--backends', 'triton'])
    assert not (tmp_path / 'out.json').exists()
    with pytest.raises(AssertionError, match='timed'):
        benchmark_ops.main([*arguments, '--backends', 'triton', 'eager'])


def test_a_backend_that_there_is_not_is_refused(capsys):
    with pytest.raises(SystemExit, match='2'):
        benchmark_ops.main(['--device', 'cpu', '--backends', 'eager', 'tritn'])
    wanted = "--backends: must be among triton, native, eager, reference, fla, got 'tritn'"
    assert wanted in capsys.readouterr().err


def test_a_peer_that_fails_does_not_end_the_run(monkeypatch, tmp_path):
    def make(tensors, options):
        raise OSError('no such kernel')

    peer = rivals.Rival(make, package='timm')
    monkeypatch.setattr(rivals, 'missing', lambda package: None)
    monkeypatch.setitem(rivals.RIVALS, 'aft-pytorch-full', peer)
    path = tmp_path / 'out.json'
    common = ['--device', 'cpu', '--rounds', '1', '--threads', '1', '--json', str(path)]
    assert benchmark_ops.main(['--cases', 'small-full', '--backends', 'eager', *common]) == 0
    rows = {row['form']: row for row in json.loads(path.read_text())['rows']}
    assert rows['aft-pytorch-full']['reason'] == 'timm failed: no such kernel'
    assert rows['eager']['milliseconds'] > 0
    # One of ours that fails does.
    monkeypatch.setitem(rivals.RIVALS, 'softmax', rivals.Rival(make))
    with pytest.raises(OSError):
        benchmark_ops.main(['--cases', 'small-full', '--backends', 'eager', *common])


def test_a_cpu_runs_the_small_cases_unless_told_otherwise(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    small = [name for name in CASES if name.startswith('small-')]
    assert benchmark_ops.parse_args(['--device', 'cpu']).names == small
    others = benchmark_ops.parse_args(['--device', 'cuda']).names
    assert sorted(others + small) == sorted(CASES)
    large = benchmark_ops.parse_args(['--device', 'cpu', '--cases', 'full-b8-*']).names
    assert large == ['full-b8-t1024-d384']


def test_the_dense_form_is_held_against_the_oracle():
    case = CASES['small-local']
    tensors = case.inputs(torch.float32, 'cpu')
    call = rivals.RIVALS['dense-local'].make(tensors, case.options)
    errors = parity.Oracle.of(case, tensors).errors(call, tensors)
    assert max(errors.values()) < 2e-5
    torch.testing.assert_close(call(*tensors), ops.aft_local(*tensors, **case.options))


def test_another_process_runs_what_it_is_given():
    assert in_fresh_process(abs, -3) == 3
