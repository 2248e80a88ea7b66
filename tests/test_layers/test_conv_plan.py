"""The plan that AFT-conv keeps in evaluation; test_stale_plan.py has changes of its bias."""

import copy
import pickle
import warnings
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrize as parametrizing
from torch.utils._python_dispatch import TorchDispatchMode

from aft_mm import ops
from aft_mm.layers import AFTConv
from aft_mm.layers.position_bias import ConvPositionBias
from aft_mm.ops import conv_plan
from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE

X = torch.randn(2, 20, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def made(monkeypatch):
    calls, forward = [], ConvPositionBias.forward
    monkeypatch.setattr(
        ConvPositionBias, 'forward', lambda self, **kw: calls.append(1) or forward(self, **kw)
    )
    return calls


def build(**options) -> AFTConv:
    torch.manual_seed(0)
    mixer = AFTConv(8, num_heads=4, kernel_size=3, grid=(4, 5), **options)
    for parameter in mixer.pos_bias.parameters():
        nn.init.normal_(parameter)
    return mixer.eval()


def fresh(mixer: AFTConv, x=X):
    """Return the output without a kept plan."""
    with mock.patch.object(ConvPositionBias, 'plan', lambda bias: ops.ConvPlan(bias())):
        return mixer(x)


@pytest.mark.parametrize('options', [{}, dict(reparameterize=False), dict(sparsity='gumbel')])
@pytest.mark.parametrize('mode', [torch.no_grad, torch.inference_mode])
def test_evaluation_makes_one_plan(options, mode, made):
    mixer = build(**options)
    expected = fresh(mixer).detach()
    made.clear()
    with mode():
        for _ in range(3):
            torch.testing.assert_close(mixer(X), expected, rtol=0, atol=0)
    assert len(made) == 1


def test_training_and_gradients_keep_no_plan(made):
    mixer = build()
    made.clear()
    for _ in range(2):
        mixer.zero_grad()
        mixer(X).square().sum().backward()
        for name, parameter in mixer.pos_bias.named_parameters():
            assert parameter.grad.abs().max() > 0, name
    mixer.train()
    with torch.no_grad():
        mixer(X), mixer(X)
    assert len(made) == 4


def edit_in_place(mixer):
    mixer.pos_bias.gamma.mul_(-2)


@torch.no_grad()
def test_a_change_of_dtype_is_detected():
    mixer = build()
    before = mixer(X)
    assert mixer.bfloat16()(X.bfloat16()).dtype == torch.bfloat16
    rounded = mixer.float()(X)
    torch.testing.assert_close(rounded, fresh(mixer), rtol=0, atol=0)
    assert not torch.equal(rounded, before)
    assert mixer.double()(X.double()).dtype == torch.float64


@torch.no_grad()
def test_a_copy_is_exported_after_an_inference():
    """Its parameters have version 0, as fake ones."""
    mixer = copy.deepcopy(build()).eval()
    mixer(X), mixer(X)
    with ops.record_paths() as paths:
        mixer(X)
    with ops.replay_paths(paths):
        program = torch.export.export(mixer, (X,), strict=False)
    assert 'pos_bias.gamma' in program.state_dict and not program.constants
    torch.testing.assert_close(program.module()(X), mixer(X))
    weights = {name: p.expand(2, *p.shape) for name, p in mixer.named_parameters()}
    both = torch.func.vmap(lambda p: torch.func.functional_call(mixer, p, X))(weights)
    torch.testing.assert_close(both[1], mixer(X))


@pytest.mark.parametrize('reparameterize', [True, False])
def test_a_parametrized_bias_may_have_no_parameter_of_its_own(reparameterize):
    mixer = build(reparameterize=reparameterize)
    parametrizing.register_parametrization(mixer.pos_bias, 'weight', nn.Identity())
    with torch.no_grad():
        torch.testing.assert_close(mixer.train().eval()(X), fresh(mixer))


@torch.no_grad()
def test_fake_tensors_and_functional_calls_keep_no_plan():
    mixer = build()
    before = mixer(X).clone()
    state = {name: 2 * p for name, p in mixer.state_dict().items()}
    torch.func.functional_call(mixer, state, X)
    with FakeTensorMode(allow_non_fake_inputs=True), ops.replay_paths([True]):
        torch.func.functional_call(mixer, {n: torch.empty(p.shape) for n, p in state.items()}, X)
    torch.testing.assert_close(mixer(X), before, rtol=0, atol=0)


@pytest.fixture
def full_calls(monkeypatch):
    calls, check_grid = [], ops.checks.check_grid
    monkeypatch.setattr(
        ops.checks, 'check_grid', lambda *a, **kw: calls.append(1) or check_grid(*a, **kw)
    )
    return calls


def transform(mixer):
    tangent = torch.ones_like(X)
    return torch.func.vmap(mixer)(X[None]), *torch.func.jvp(mixer, (X,), (tangent,))


def record(mixer):
    with ops.record_paths() as paths:
        mixer(X)
    return torch.tensor(paths, dtype=torch.float32)


def autocast(mixer):
    with torch.autocast('cpu', torch.bfloat16):
        return mixer(X)


def count_threads(mixer):
    threads = torch.get_num_threads()
    torch.set_num_threads(threads % 2 + 1)
    try:
        return mixer(X)
    finally:
        torch.set_num_threads(threads)


def trace(mixer):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', torch.jit.TracerWarning)
        return torch.jit.trace(mixer, X, check_trace=False)(X)


def count_reads(mixer):
    with ReadCounter():
        return mixer(X)


def with_gradient(mixer):
    with torch.enable_grad():
        return mixer(X).detach()


def with_other_gate(mixer):
    mixer.gate = 'relu'
    return mixer(X)


def with_other_strides(mixer):
    def columns_first(layer, args, output):
        return output.transpose(0, 1).contiguous().transpose(0, 1)

    with mixer.value.register_forward_hook(columns_first):
        return mixer(X)


OTHER_CALLS = {
    'another grid': lambda mixer: mixer(X, grid=(5, 4)),
    'another batch': lambda mixer: mixer(X[:1]),
    'a mask': lambda mixer: mixer(X, key_mask=X[..., 0] > 0),
    'a transform': transform,
    'a recording': record,
    'autocast': autocast,
    'threads': count_threads,
    'bfloat16': lambda mixer: mixer.bfloat16()(X.bfloat16()),
    'a trace': trace,
    'a dispatch mode': count_reads,
    'gradients': with_gradient,
    'another gate': with_other_gate,
    'other strides': with_other_strides,
}


@pytest.mark.parametrize('backend', [None, 'eager'])
@pytest.mark.parametrize('call', OTHER_CALLS.values(), ids=OTHER_CALLS)
@torch.no_grad()
def test_only_a_call_of_the_same_kind_is_repeated_without_checks(
    call, backend, full_calls, monkeypatch
):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    if backend:
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, backend)
    mixer = build()
    nn.init.normal_(mixer.pos_bias.gamma, std=0.1)
    expected = fresh(mixer, 2 * X), call(copy.deepcopy(mixer))
    mixer(X)
    full_calls.clear()
    torch.testing.assert_close(mixer(2 * X), expected[0], rtol=0, atol=0)
    assert not full_calls
    torch.testing.assert_close(call(mixer), expected[1], rtol=0, atol=0)
    assert full_calls
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'reference')
    full_calls.clear()
    mixer.float()(X)
    assert full_calls


class ReadCounter(TorchDispatchMode):
    """Counts reads of single values, each of which would synchronise with a device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_values_of_a_kernel_are_read_once(monkeypatch):
    """One read per form that is not exact; after the change w is below −3."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'eager')
    mixer = build()
    reads, check, counts = [], conv_plan.is_range_exact, []
    monkeypatch.setattr(conv_plan, 'is_range_exact', lambda *x: reads.append(1) or check(*x))
    for change in (None, None, edit_in_place, None):
        if change:
            change(mixer)
        mixer(X), mixer(X[:1])
        counts.append(len(reads))
    assert counts == [1, 1, 3, 3]


def test_a_parametrized_bias_is_copied_after_an_inference():
    mixer = build()
    with torch.no_grad():
        mixer(X)
    assert mixer.pos_bias._kept is not None
    parametrizing.register_parametrization(mixer.pos_bias, 'weight', nn.Tanh())
    other = copy.deepcopy(mixer)
    with torch.no_grad():
        assert torch.equal(other(X), mixer(X))
        mixer.pos_bias.gamma.add_(1)
        assert not torch.equal(other(X), mixer(X))


@pytest.mark.parametrize('backend', ['native,eager', 'eager'])
@pytest.mark.parametrize(
    'duplicate', [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_plan_can_be_copied_after_its_use(duplicate, backend, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, backend)
    plan = ops.plan_conv(torch.randn(4, 3, 3))
    query, value = torch.randn(2, 2, 20, 8)
    key = torch.randn(2, 20, 4)
    with torch.no_grad():
        expected = ops.aft_conv(query, key, value, plan, grid=(4, 5))
        assert plan._call is not None
        other = duplicate(plan)
        for _ in range(2):
            got = ops.aft_conv(query, key, value, other, grid=(4, 5))
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
