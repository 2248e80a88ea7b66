"""The C++ loops read and write memory only after the checks that torch makes for its operators."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode

from aft_mm import ops
from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE
from aft_mm.ops.native import availability

from ..helpers import nightly

pytestmark = pytest.mark.adversarial
B, T, D, HEADS = 2, 35, 12, 4


@pytest.fixture(autouse=True)
def native(monkeypatch):
    if isinstance(reason := availability.find_library(), str):
        pytest.skip(f'the loops cannot be used: native {reason}')
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'native')


def simple(query, key, value, weight=None, **options):
    return ops.aft_simple(query, key, value, causal=True, **options)


def conv(query, key, value, weight, **options):
    return ops.aft_conv(query, key[..., :HEADS], value, weight, grid=(5, 7), **options)


def full(query, key, value, weight=None, **options):
    return ops.aft_full(query, key, value, torch.ones(B, T, T).cumsum(2), **options)


LOOPS = pytest.mark.parametrize('op', [simple, conv, full], ids=lambda op: op.__name__)


def inputs(gradient=True):
    tensors = [*torch.randn(3, B, T, D).unbind(), 0.5 * torch.randn(HEADS, 3, 5)]
    return [x.clone().requires_grad_(gradient) for x in tensors]


def gradients(op, tensors):
    tensors = tensors if op is conv else tensors[:3]
    return torch.autograd.grad(op(*tensors).square().sum(), tensors)


UNPACK = {
    'float16': lambda x: x.half(),
    'float64': lambda x: x.double(),
    'longer': lambda x: torch.cat([x, x]),
    'shorter': lambda x: x[:, :1],
    'flat': lambda x: x.flatten(),
    'meta': lambda x: x.to('meta'),
}


@LOOPS
@pytest.mark.parametrize('unpack', UNPACK.values(), ids=UNPACK)
def test_saved_tensor_hooks_that_return_another_tensor(op, unpack):
    """Sums over memory of another type or size would corrupt the heap."""

    def changed(x):
        return unpack(x) if x.dim() >= 3 and x.shape[:1] == (B,) else x

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, changed):
        output = op(*inputs())
    with pytest.raises(RuntimeError, match='^hooks must return .* got torch.float') as error:
        output.sum().backward()
    assert '\n' not in str(error.value)


@LOOPS
def test_lazy_signs(op):
    """The sign of a lazy negation is a flag of the tensor, which is not in its memory."""
    plain = inputs()
    expected = op(*plain), *gradients(op, plain)

    def negated(x):
        view = torch.complex(torch.zeros_like(x), -x).conj().imag
        assert view.is_neg()
        return view

    for negate in (negated, lambda x: torch._neg_view(-x)):
        lazy = [negate(x.detach()).requires_grad_() for x in plain]
        got = op(*lazy), *gradients(op, lazy)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: torch._neg_view(-x)):
        got = gradients(op, plain)
    assert all(torch.equal(a, b) for a, b in zip(got, expected[1:], strict=True))
    cotangent = torch.randn(B, T, D)
    wanted = plain if op is conv else plain[:3]
    lazy = torch.autograd.grad(op(*plain), wanted, torch._neg_view(-cotangent))
    for a, b in zip(lazy, torch.autograd.grad(op(*plain), wanted, cotangent), strict=True):
        assert torch.equal(a, b)


@LOOPS
def test_tensors_without_memory(op):
    tensors = inputs(gradient=False)
    with FakeTensorMode():
        mask = torch.ones(B, T, dtype=torch.bool)
    with pytest.raises(RuntimeError, match='a subclass of torch.Tensor needs torch operations'):
        op(*tensors, key_mask=mask)
    for index in range(3):
        freed = [x.clone() for x in tensors]
        freed[index].untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match='must have memory|storage of size 0'):
            op(*freed)


@LOOPS
def test_zero_gradient_without_memory(op):
    tensors = inputs()
    zero = torch._efficientzerotensor(B, T, D)
    for x in torch.autograd.grad(op(*tensors), tensors[:3], zero):
        assert (x == 0).all()


def test_frozen_weight_that_is_written_to_before_a_second_derivative():
    *tokens, weight = inputs()
    weight = weight.detach()
    expected = torch.autograd.grad(conv(*tokens, weight).sum(), tokens)
    first, second = conv(*tokens, weight).sum(), conv(*tokens, weight).sum()
    weight += 1
    # The loops use a copy of the weight: the plain gradient is that of the old weight.
    for a, b in zip(torch.autograd.grad(first, tokens), expected, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match='^weight must not be modified in place'):
        torch.autograd.grad(second, tokens, create_graph=True)


def run(code, package):
    environment = {**os.environ, 'PYTHONPATH': str(package)}
    environment.pop(ENVIRONMENT_VARIABLE)
    command = [sys.executable, '-c', code]
    return subprocess.run(
        command, env=environment, cwd=package, text=True, capture_output=True, timeout=120
    )


DAMAGES = {
    'cut': lambda whole: whole[: len(whole) // 2],
    'zeros': lambda whole: whole[: len(whole) // 2] + bytes(len(whole) // 2),
    'bit': lambda whole: whole[:50_000] + bytes([whole[50_000] ^ 1]) + whole[50_001:],
    'empty': lambda whole: b'',
    'text': lambda whole: b'not a library',
}


@pytest.mark.parametrize('damage', [*DAMAGES, 'no hash'])
def test_damaged_library_is_not_loaded(damage, tmp_path, monkeypatch, caplog):
    library = availability.find_library()
    copy = tmp_path / library.name
    copy.write_bytes(DAMAGES.get(damage, bytes)(library.read_bytes()))
    if damage != 'no hash':
        shutil.copy(f'{library}.sha256', tmp_path)
    monkeypatch.setattr(availability, 'FOLDER', tmp_path)
    availability.find_library.cache_clear()
    try:
        tensors = inputs(gradient=False)
        with pytest.raises(ops.dispatch.BackendError, match='native: .* is damaged or has no hash'):
            simple(*tensors)
        monkeypatch.delenv(ENVIRONMENT_VARIABLE)
        assert simple(*tensors).isfinite().all()
        assert caplog.text.count('the C++ loops are not used: ') == 1
    finally:
        monkeypatch.undo()
        availability.find_library.cache_clear()


def test_process_survives_a_damaged_library(tmp_path):
    """Loading one would end the process by SIGBUS."""
    source = availability.FOLDER.parents[1]
    ignored = shutil.ignore_patterns('__pycache__', '.mim')
    shutil.copytree(source, tmp_path / source.name, ignore=ignored)
    for library in tmp_path.glob('**/loops.*.so'):
        library.write_bytes(DAMAGES['cut'](library.read_bytes()))
    code = 'import torch; from aft_mm import ops; x = torch.ones(1, 9, 4); '
    done = run(f'{code} print(ops.aft_simple(x, x, x, causal=True).shape)', tmp_path)
    assert done.returncode == 0 and done.stdout == 'torch.Size([1, 9, 4])\n', done.stderr
    assert done.stderr.startswith('the C++ loops are not used: ') and done.stderr.count('\n') == 1


OUT_OF_MEMORY = """
import resource
import torch
from aft_mm import ops
torch.set_num_threads(3)
weight = 0.1 * torch.randn(64, 3)
caught = set()

def prepare(tokens):
    x = [torch.randn(1, tokens, 64).requires_grad_({gradient}) for _ in range(3)]
    forward = lambda: ops.aft_conv(*x, weight, grid=(tokens,))
    if not {gradient}:
        return forward
    output = forward()
    return lambda: torch.autograd.grad(output, x, output.detach())

prepare(900)()  # starts the threads
for megabytes in range(0, 60, 3):
    call = prepare(20000)
    pages = int(open('/proc/self/statm').read().split()[0])
    limit = pages * resource.getpagesize() + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        call()
        caught.add('none')
    except (MemoryError, RuntimeError) as error:
        caught.add(str(error).split(' of ')[0])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
print(sorted(caught))
"""


@pytest.mark.parametrize(
    'name, gradient', nightly([('forward', False), ('backward', True)], [('forward', False)])
)
def test_memory_that_runs_out_inside_a_loop(name, gradient):
    """An exception that leaves a parallel region ends the process."""
    done = run(OUT_OF_MEMORY.format(gradient=gradient), availability.FOLDER.parents[2])
    assert done.returncode == 0, done.stderr
    assert f'aft_conv_{name}' in done.stdout and 'none' in done.stdout
