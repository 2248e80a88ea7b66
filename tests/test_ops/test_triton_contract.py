"""Properties of the Triton kernels of every op; see `triton_parity.py`."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from aft_mm import ops
from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE
from aft_mm.ops.triton import availability as triton_availability

from ..helpers import nightly
from .cases import run_with_gradients
from .test_backends import assert_close, oracle
from .triton_parity import DEVICE, INTERPRETED, MARKS, TERMS, TOLERANCE, compare, inputs, layouts

from aft_mm.ops.triton import simple  # isort: skip - where Triton is
from .kernel_cases import NoWait, causal_simple, conv, full, local  # isort: skip

pytestmark = MARKS
CASES = {
    'simple': causal_simple(19),
    'simple relu': causal_simple(9, key_function='relu'),
    'conv': conv(heads=4),
    'full': full(9, 5),
    'full causal': full(9, causal=True),
    'local': local(9, 3),
    'local free': local(9, 3, rank=0, causal=True),
    'local 2-d': local(9, (2, 2), grid=(3, 3), causal=True),
}
# relu hides no key.
EXACT = [name for name in CASES if 'relu' not in name]
each_exact = pytest.mark.parametrize('name', EXACT)
ONE_PER_OP = ['simple', 'conv', 'full causal']
each_op = pytest.mark.parametrize('name', ONE_PER_OP)
same_bits = dict(rtol=0, atol=0)


def cotangent_of(output):
    x = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return x.transpose(0, 2).contiguous().transpose(0, 2)


@pytest.mark.parametrize(
    'name',
    nightly(CASES, lambda name: name == 'simple relu' or name.startswith('local')),
)
def test_padding_may_be_nan_or_inf(name, monkeypatch):
    case = CASES[name]
    query, key, value, *bias = inputs(case, batch=4)
    tokens = key.shape[1]
    mask = torch.rand(4, tokens, device=DEVICE) < 0.6
    mask[1], mask[2, :4], mask[3, 4:] = False, False, False
    hidden = ~mask.unsqueeze(-1)
    if 'relu' not in name:
        key = key * torch.tensor([1, 1, 1000, 1000], device=DEVICE).view(4, 1, 1)
    clean = [query, key.masked_fill(hidden, 0), value.masked_fill(hidden, 0), *bias]
    poisoned = [query, key.masked_fill(hidden, torch.nan), value.masked_fill(hidden, torch.inf)]
    got = run_with_gradients(case, [*poisoned, *bias], key_mask=mask)
    expected = oracle(case, clean, monkeypatch, key_mask=mask)
    assert_close(got, expected, TOLERANCE[torch.float32], TERMS)
    assert (got[0][1] == 0).all()
    assert not case.options.get('causal') or (got[0][2, :4] == 0).all()
    assert all((x.masked_select(hidden) == 0).all() for x in got[2:4])


@each_exact
def test_a_key_of_minus_infinity_is_hidden(name):
    case = CASES[name]
    query, key, *others = inputs(case)
    mask = torch.ones(key.shape[:2], dtype=torch.bool, device=DEVICE)
    mask[:, [0, 4]] = False
    expected = case(query, key, *others, key_mask=mask)
    key[:, [0, 4]] = -torch.inf
    assert torch.equal(case(query, key, *others), expected)


@each_exact
def test_nan_is_not_hidden_and_does_not_spread(name, monkeypatch):
    """Outputs are NaN where the oracle depends on the number."""
    case = CASES[name]
    for which in (1, 2):
        tensors = inputs(case)
        with monkeypatch.context() as patch:
            patch.setenv(ENVIRONMENT_VARIABLE, 'reference')
            before = case(*(x.double() for x in tensors))
            tensors[which][0, 1, 0] += 1
            depends = case(*(x.double() for x in tensors)) != before
        tensors[which][0, 1, 0] = torch.nan
        assert torch.equal(case(*tensors).isnan(), depends) and depends.any()


@pytest.mark.parametrize('name', nightly(EXACT, lambda name: name.startswith('local')))
def test_layouts(name):
    case = CASES[name]
    tensors = inputs(case)
    expected = run_with_gradients(case, tensors)
    bias = [x.movedim(-1, 0).contiguous().movedim(0, -1) for x in tensors[3:]]
    other = [*layouts(tensors[:3]), *bias]
    assert not any(x.is_contiguous() for x in other)
    leaves = [x.requires_grad_() for x in other]
    mask = torch.ones(tensors[1].shape[1], 2, dtype=torch.bool, device=DEVICE).T
    output = case(*leaves, key_mask=mask)
    assert torch.equal(output, expected[0]) and output.is_contiguous()
    gradients = torch.autograd.grad(output, leaves, cotangent_of(output))
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected[1:], strict=True))


# The product kernels only keep it to rounding: see test_triton_product.py.
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
def test_a_late_spike_leaves_the_prefix_as_it_was(dtype, monkeypatch):
    case = CASES['simple']
    query, key, value = inputs(case, 1, dtype)
    before = case(query, key, value)
    key[:, -3] += 1000
    after = compare(case, [query, key, value], monkeypatch, TERMS)[0]
    assert torch.equal(after[:, :-3], before[:, :-3])


@pytest.mark.parametrize('name', ['simple', 'conv'])
def test_expanded_inputs_and_gradients(name):
    case = CASES[name]
    one, key, _, *bias = inputs(case)
    one = one[:1, :1].requires_grad_()
    leaf = one.detach().expand_as(key).contiguous().requires_grad_()
    expanded = one.expand(2, case.tokens, -1)
    (got,) = torch.autograd.grad(case(expanded, key, expanded, *bias).sum(), one)
    (parts,) = torch.autograd.grad(case(leaf, key, leaf, *bias).sum(), leaf)
    torch.testing.assert_close(got, parts.sum((0, 1), keepdim=True), rtol=1e-5, atol=1e-5)


@each_op
def test_an_empty_batch(name):
    case = CASES[name]
    leaves = [x.requires_grad_() for x in inputs(case, batch=0)]
    output = case(*leaves)
    assert output.shape == (0, case.tokens, leaves[2].shape[2])
    for leaf, gradient in zip(leaves, torch.autograd.grad(output.sum(), leaves), strict=True):
        assert gradient.shape == leaf.shape and (gradient == 0).all()


@each_op
def test_inputs_may_have_different_dtypes(name, monkeypatch):
    query, key, value, *bias = inputs(CASES[name])
    tensors = [query.half(), key, value.bfloat16(), *bias]
    got = run_with_gradients(CASES[name], tensors)
    assert [x.dtype for x in got] == [torch.bfloat16, *(x.dtype for x in tensors)]
    assert_close(got, oracle(CASES[name], tensors, monkeypatch), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize('gate', ['relu', 'none', 'silu'])
@pytest.mark.parametrize('name', nightly(ONE_PER_OP, ['conv', 'full causal']))
def test_gates(name, gate, monkeypatch):
    case = CASES[name]
    query, *others = inputs(case)
    if gate == 'none':
        compare(lambda *x, **extra: case(None, *x, gate=gate, **extra), others, monkeypatch)
    else:
        query[0, :3] = torch.tensor([0.0, 1e4, -1e4]).view(3, 1)
        compare(lambda *x, **extra: case(*x, gate=gate, **extra), [query, *others], monkeypatch)


@each_op
def test_autocast_does_not_reach_the_sums(name):
    tensors = inputs(CASES[name])
    expected = run_with_gradients(CASES[name], tensors)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        inside = run_with_gradients(CASES[name], tensors)
    assert all(torch.equal(a, b) for a, b in zip(inside, expected, strict=True))


@pytest.mark.parametrize('name', ['simple', 'conv', 'full', 'local free'])
def test_memory_saved_for_the_gradient(name):
    """Three numbers per token and channel, two for a product, and no copies of inputs."""
    case = CASES[name]
    tensors = [x.requires_grad_() for x in inputs(case)]
    parts = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: parts.append(x) or x, lambda x: x):
        output = case(*tensors)
    own = {x.data_ptr() for x in tensors}
    (saved,) = (x for x in parts if x.data_ptr() not in own and x.is_floating_point())
    assert saved.dtype == torch.float32
    numbers = 3 if name == 'simple' else 2
    assert output.numel() < saved.numel() <= numbers * output.numel() + 70


@pytest.mark.parametrize('name', ['simple', 'full causal'])
def test_only_requested_gradients_are_returned(name):
    case = CASES[name]
    expected = run_with_gradients(case, tensors := inputs(case))
    for wanted in range(len(tensors)):
        leaves = [x.detach().requires_grad_(n == wanted) for n, x in enumerate(tensors)]
        output = case(*leaves)
        output.backward(cotangent_of(output))
        torch.testing.assert_close(leaves[wanted].grad, expected[1 + wanted], rtol=1e-5, atol=1e-6)
        assert sum(x.grad is not None for x in leaves) == 1


@pytest.mark.parametrize('name', nightly(['simple', 'full'], ['full']))
def test_opcheck(name):
    """Schema, fake kernel, autograd registration, compiled with dynamic shapes."""
    case = CASES[name]
    query, key, *others = (x.requires_grad_() for x in inputs(case, batch=1))
    bare = case.options.get('gate') == 'none' or name == 'full'
    mask = None if bare else (torch.rand(key.shape[:2]) < 0.6).to(DEVICE)
    extra = dict(gate='none') if bare else {}
    with NoWait() as mode:
        output = case(None if bare else query, key, *others, key_mask=mask, **extra)
        torch.autograd.grad(output.sum(), key)
    (forward, arguments), (backward, more) = mode.calls
    arguments, more = (
        [x.detach() if isinstance(x, torch.Tensor) else x for x in parts]
        for parts in (arguments, more)
    )
    for x in arguments:
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            x.requires_grad_()
    torch.library.opcheck(forward, arguments)
    wanted = [not bare, True, True, *([True, False] if others[1:] else [])][: len(more[-1])]
    torch.library.opcheck(backward, (*more[:-1], wanted))


@pytest.mark.parametrize('name', nightly(ONE_PER_OP, ['full causal']))
def test_unsupported_gradients_give_a_reason(name):
    case = CASES[name]
    leaves = [x.requires_grad_() for x in inputs(case)]
    with NoWait() as mode:
        output = case(*leaves)
    ((op, arguments),) = mode.calls
    called = iter(leaves)
    parts = [next(called, x) if isinstance(x, torch.Tensor) else x for x in arguments[:-1]]
    with pytest.raises(RuntimeError, match='must be called with save=True'):
        op(*parts, False)[0].sum().backward()
    assert op(*parts, False)[1].numel() == 0
    (gradient,) = torch.autograd.grad(output.sum(), leaves[1], create_graph=True)
    message = 'once; AFT_MM_BACKEND=eager supports second derivatives'
    with pytest.raises(RuntimeError, match=message):
        gradient.sum().backward()
    batched = torch.ones(2, *output.shape, device=DEVICE)
    with pytest.raises(RuntimeError, match='cannot be batched; AFT_MM_BACKEND=eager supports'):
        torch.autograd.grad(case(*leaves), leaves, batched, is_grads_batched=True)


@each_op
def test_the_op_does_not_synchronise(name, monkeypatch):
    """With fake tensors, for which reading a value fails, and with others."""
    case = CASES[name]
    with NoWait():
        run_with_gradients(case, tensors := inputs(case))
    with NoWait(), pytest.raises(AssertionError, match='waits for the device'):
        bool((tensors[0] > 0).all())
    monkeypatch.setattr(triton_availability, 'machine_reasons', lambda kind, index: ())
    with FakeTensorMode():
        leaves = [torch.empty(x.shape, requires_grad=True) for x in tensors]
        gradients = torch.autograd.grad(case(*leaves).sum(), leaves)
    assert [x.shape for x in gradients] == [x.shape for x in leaves]


def test_a_kernel_error_is_raised(monkeypatch):
    def fail(*args, **options):
        raise RuntimeError('out of registers')

    monkeypatch.setattr(simple.simple_forward_kernel, 'run', fail)
    with pytest.raises(RuntimeError, match='out of registers'):
        CASES['simple'](*inputs(CASES['simple']))


# A second call with another length, or with keys for which other rows are recomputed.
COMPILED = {
    'simple': (causal_simple(9), causal_simple(20), 1),
    'conv': (conv(), conv(), 1),
    'local 2-d': (CASES['local 2-d'],) * 2 + (1000,),
}


@pytest.mark.parametrize('name', nightly(COMPILED, ['local 2-d']))
def test_compiles_without_graph_break(name):
    torch._dynamo.reset()
    *cases, scale = COMPILED[name]
    compiled = torch.compile(cases[0].function, fullgraph=True, backend='aot_eager')
    exact = same_bits if 'simple' in name else dict(rtol=1e-4, atol=1e-5)
    for case, size in zip(cases, (1, scale), strict=True):
        tensors = inputs(case, batch=1)
        tensors[1] = tensors[1] * size
        if name == 'conv' and case is cases[1]:
            tensors[3] = tensors[3] * 100
        expected = run_with_gradients(case, tensors)
        got = run_with_gradients(lambda *x, case=case: compiled(*x, **case.options), tensors)
        torch.testing.assert_close(got, expected, **exact)


BIG = {
    'aft_simple': dict(causal=True),
    'aft_conv': dict(grid=(40, 50)),
    'aft_local': dict(window=32, causal=True),
}


@pytest.mark.skipif(INTERPRETED, reason='takes 60 GB')
@pytest.mark.parametrize('op', BIG)
def test_more_than_2_to_the_31_elements(op):
    """Equals the last of many sequences alone."""
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip('needs 60 GB of device memory')
    x = torch.randn(1, 2000, 1024, device=DEVICE, dtype=torch.bfloat16)
    bias = {
        'aft_conv': [torch.randn(1024, 3, 3, device=DEVICE)],
        'aft_local': torch.randn(2, 2000, 16, device=DEVICE, dtype=torch.bfloat16).unbind(),
    }.get(op, [])
    many = x.new_zeros(1100, 2000, 1024)
    many[-1] = x[0]
    call = getattr(ops, op)
    got = call(many, many, many, *bias, **BIG[op])[-1:]
    torch.testing.assert_close(got, call(x, x, x, *bias, **BIG[op]))
