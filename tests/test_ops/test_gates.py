"""Gates that no kernel computes: torch applies them to what the kernels return."""

from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from aft_mm import ops
from aft_mm.layers import AFTConv, AFTSimple
from aft_mm.ops import reference
from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE
from aft_mm.ops.gates import FUNCTIONS, GATES
from aft_mm.registry import MODELS

from ..errors import refuses
from ..helpers import each
from ..test_layers.mixer_cases import MIXERS, D, build, check_steps, tokens
from .cases import ONE_OF_EACH, TOLERANCE, run_with_gradients
from .test_backends import assert_close, oracle

OTHERS = [name for name in FUNCTIONS if name not in GATES]
GATED = [name for name in MIXERS if hasattr(build(name, (3, 4)), 'gate')]


def ungated(case, key, value, *bias, **options):
    """Return the mean that the gate multiplies, by the oracle."""
    return case(None, key, value, *bias, gate='none', **options)


@each('backend', ['eager', 'native,eager'])
@pytest.mark.parametrize('case', ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_matches_the_oracle(case, backend, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, backend)
    if 'relu2' in case.options.values():
        refuses("gate must be 'relu' for key_function='relu2'", case, *case.inputs(), gate='tanh')
        return
    for dtype in (torch.float32, torch.bfloat16):
        inputs = case.inputs(dtype=dtype)
        mask = torch.rand(inputs[1].shape[:2]) < 0.7
        got = run_with_gradients(case, inputs, gate='silu', key_mask=mask)

        def expected(query, *others, **options):
            return F.silu(query) * ungated(case, *others, **options)

        assert_close(got, oracle(expected, inputs, monkeypatch, key_mask=mask), TOLERANCE[dtype])


@each('name', OTHERS)
def test_every_name_changes_the_output_and_is_the_function_of_torch(name):
    query, key, value = 4 * torch.randn(3, 2, 9, 4, dtype=torch.float64)
    mean = reference.aft_simple(
        None, key, value, key_function='softmax', causal=False, key_mask=None, gate='none'
    )
    got = ops.aft_simple(query, key, value, gate=name)
    function = getattr(F, name, lambda x: x)
    torch.testing.assert_close(got, function(query) * mean)
    torch.testing.assert_close(ops.apply_gate(query, mean, name), got)
    for other in FUNCTIONS:
        same = torch.equal(got, ops.aft_simple(query, key, value, gate=other))
        assert same == (other == name or {name, other} == {'celu', 'elu'})


def test_modules_and_functions_are_gates_too():
    query, key, value = torch.randn(3, 2, 5, 4)
    before = query.clone()
    for gate, name in ((nn.Tanh(), 'tanh'), (F.silu, 'silu'), (nn.SiLU(inplace=True), 'silu')):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                got = ops.aft_simple(query, key, value, causal=True, gate=gate)
                expected = ops.aft_simple(query, key, value, causal=True, gate=name)
                torch.testing.assert_close(got, expected)
                assert torch.equal(query, before)


@each('name', [name for name in GATED if 'no-query' not in name and 'relu2' not in name])
def test_mixers_and_their_steps(name):
    grid, x = (3, 4), tokens((3, 4))
    mixer = build(name, grid, gate='tanh')
    sigmoid = build(name, grid)
    sigmoid.load_state_dict(mixer.state_dict())
    assert not torch.allclose(mixer(x), sigmoid(x), atol=1e-3)
    # A query of 0 is a gate of 0, and a large one a gate of 1.
    for bias, gate in ((0.0, 0.0), (40.0, 1.0)):
        with torch.no_grad():
            mixer.query.weight.zero_()
            mixer.query.bias.fill_(bias)
        bare = build(name, grid, gate='none')
        bare.load_state_dict(mixer.state_dict(), strict=False)
        expected = (bare(x) - bare.proj.bias) * gate + bare.proj.bias
        torch.testing.assert_close(mixer(x), expected, atol=1e-5, rtol=1e-5)


@each('name', ['AFTSimple', 'AFTFull', 'AFTLocal', 'AFTConv', 'AFTLocalHard', 'DepthwiseConv'])
def test_steps(name):
    check_steps(build(name, gate='gelu', causal=True), tokens((7,)))


@each('config', ['torch.nn.PReLU', nn.PReLU])
def test_a_config_builds_a_gate_whose_parameters_are_learned(config):
    mixer = MODELS.build(dict(type='aft_mm.AFTSimple', embed_dims=D, gate=dict(type=config)))
    assert 'gate.weight' in mixer.state_dict()
    mixer(tokens((7,))).sum().backward()
    assert mixer.gate.weight.grad.abs().sum() > 0
    same = MODELS.build(dict(type='aft_mm.AFTSimple', embed_dims=D, gate=dict(type=config)))
    assert same.gate is not mixer.gate


@each('name', ['AFTSimple', 'AFTConv', 'DepthwiseConv', 'Identity'])
@each('module', [nn.PReLU, partial(nn.Linear, D, D)])
def test_modules_with_parameters_compute_in_any_dtype(name, module):
    mixer, x = build(name, gate=module(), causal=name != 'Identity').eval(), tokens((7,))
    expected = mixer(x)
    wide = deepcopy(mixer).double()(x.double())
    torch.testing.assert_close(wide, expected.double(), atol=1e-5, rtol=1e-4)
    with torch.autocast('cpu', torch.bfloat16):
        mixed = mixer(x)
    low = mixer.bfloat16()
    for y in (mixed, low(x.bfloat16())):
        assert y.dtype == torch.bfloat16
        assert (y.float() - expected).norm() < 0.05 * expected.norm()
    if mixer.has_steps and mixer.causal:
        y, _ = low.step(x[:, 0].bfloat16(), low.init_state(len(x)))
        assert (y.float() - expected[:, 0]).norm() < 0.05 * expected[:, 0].norm()


def test_graphs_contain_the_gate():
    x = torch.randn(2, 20, D)
    layer = AFTSimple(D, causal=True, gate='softplus').eval()
    with torch.no_grad():
        graph = torch.export.export(layer, (x,)).module()
        torch.testing.assert_close(graph(x), layer(x))
    layer = AFTConv(D, num_heads=3, kernel_size=3, grid=(4, 5), gate='mish').eval()
    compiled = torch.compile(layer, fullgraph=True, backend='aot_eager')
    torch.testing.assert_close(compiled(x), layer(x))


NAMES = 'none, sigmoid, relu, .* celu, elu, .* tanhshrink, or a module or function'


@each('gate', ['tan', 'Tanh', '', None, 5, ['sigmoid'], nn.Tanh, dict])
def test_other_values_are_refused(gate):
    x = torch.randn(2, 5, D)
    message = f'gate must be {NAMES}, got {gate!r}'.replace('[', r'\[').replace(']', r'\]')
    refuses(message, ops.aft_simple, x, x, x, gate=gate)
    refuses(message, AFTConv, D, num_heads=3, kernel_size=3, gate=gate)
    state = ops.aft_simple_init_state(2, D)
    refuses(message, ops.aft_simple_step, state, x[:, 0], x[:, 0], x[:, 0], gate=gate)
    refuses(message, ops.apply_gate, x, x, gate)


def test_a_function_must_keep_the_shape():
    x = torch.randn(2, 5, 4)
    message = r'gate must return a tensor of the shape \[2, 5, 4\] of query, got .*\[2, 5, 2\] from'
    refuses(message, ops.aft_simple, x, x, x, gate=F.glu)
    refuses("query must be None exactly for gate='none'", ops.aft_simple, None, x, x, gate='tanh')
    refuses("query must be a tensor with gate='tanh', got None", ops.apply_gate, None, x, 'tanh')
    refuses("mixed must be a tensor with gate='tanh', got 5", ops.apply_gate, x, 5, 'tanh')
