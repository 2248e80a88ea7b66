"""What tools/benchmarks takes for the time of a call on a device."""

import contextlib
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent, Kernel

TOOLS = Path(__file__).parents[1] / 'tools' / 'benchmarks'
sys.path.insert(0, str(TOOLS))

import timing  # noqa: E402


def event(name, start, end, device=DeviceType.CUDA, **more):
    return FunctionEvent(
        len(name), name, 0, start, end, device_type=device, use_device='cuda', **more
    )


@pytest.fixture
def recorded():
    """A call of two operators: three kernels, of which one runs twice, and a copy, 20 µs in all."""
    operator = event('aten::mm', 0, 500, DeviceType.CPU)
    operator.kernels.append(Kernel('gemm', 0, 10.0))
    return [
        operator,
        event('cudaLaunchKernel', 1, 40, DeviceType.CPU),
        event('gemm', 100, 110),
        event('gate', 110, 112.5),
        event('gate', 120, 122.5),
        event('Memcpy HtoD', 130, 135),
        # Neither works: a wait, and a range over all of it.
        event('Context Sync', 0, 900),
        event('step 1', 90, 140, is_user_annotation=True),
    ]


def test_the_time_of_a_call_is_that_of_its_kernels_and_copies(recorded):
    assert timing.kernel_times(recorded) == pytest.approx(
        {'gemm': 10e-6, 'gate': 5e-6, 'Memcpy HtoD': 5e-6}
    )


@pytest.mark.parametrize('left', [0, 2, 'no time'])
def test_no_kernel_is_an_error_and_no_time_of_zero(left, recorded):
    events = [event('gemm', 5, 5)] if left == 'no time' else recorded[:left]
    with pytest.raises(RuntimeError, match='the profiler saw no kernel'):
        timing.kernel_times(events)


def test_it_reads_what_torch_records():
    """On a CPU nothing of it is a kernel, until it is said to have run elsewhere."""
    left, right = torch.randn(2, 64, 64).unbind()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorder:
        for _ in range(3):
            left @ right
    events = recorder.events()
    with pytest.raises(RuntimeError, match='no kernel'):
        timing.kernel_times(events)
    products = [e for e in events if e.name == 'aten::mm']
    expected = sum(product.cpu_time_total for product in products) / 1e6
    for product in products:
        product.device_type = DeviceType.CUDA
    assert len(products) == 3 and timing.kernel_times(events) == pytest.approx(
        {'aten::mm': expected}
    )


def test_a_gpu_is_timed_by_the_profiler_with_the_wall_time_beside(recorded, monkeypatch):
    seen = []

    class Recorder:
        def events(self):
            return recorded

    class Buffer:
        def zero_(self):
            seen.append('flush')

    @contextlib.contextmanager
    def profile(activities):
        assert activities == [torch.profiler.ProfilerActivity.CUDA]
        seen.append('profile')
        yield Recorder()
        seen.append('end')

    monkeypatch.setattr(torch.profiler, 'profile', profile)
    monkeypatch.setattr(torch.cuda, 'synchronize', lambda device: seen.append('wait'))
    monkeypatch.setattr(timing, '_flush_buffer', lambda device: Buffer())
    calls = {name: lambda name=name: seen.append(name) for name in 'ab'}
    times, walls = timing.both_clocks(calls, 2, 'cuda')
    assert times == {name: pytest.approx([20e-6] * 2) for name in 'ab'}
    assert all(len(walls[name]) == 2 and 0 < min(walls[name]) < 1 for name in 'ab')
    # The flush is over before the recording starts, which ends when the kernels have.
    timed = {n: ['flush', 'wait', 'profile', n, 'wait', 'end'] for n in 'ab'}
    alone = {n: [n, 'wait'] for n in 'ab'}
    turn = timed['a'] + alone['a'] + timed['b'] + alone['b']
    assert seen == timed['a'] + timed['b'] + turn * 2


def test_a_cpu_has_one_clock():
    times, walls = timing.both_clocks({'a': lambda: None}, 3)
    assert times is walls and len(times['a']) == 3
    assert timing.interleaved({'a': lambda: None}, 3)['a'][0] > 0


def test_the_clock_of_the_process_stands_still_while_others_run():
    calls = {'sleep': lambda: time.sleep(0.05)}
    assert timing.interleaved(calls, 1)['sleep'][0] >= 0.05
    assert timing.interleaved(calls, 1, clock='cpu')['sleep'][0] < 0.02
