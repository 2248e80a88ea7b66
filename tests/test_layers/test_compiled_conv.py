"""Compiled evaluation of AFT-conv: one form in the graph, the one that is exact for the kernel."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from aft_mm import ops
from aft_mm.layers.mixers import AFTConv
from aft_mm.ops import reference
from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE
from aft_mm.ops.eager import conv

from ..helpers import nightly

pytestmark = pytest.mark.slow

GRID = (5, 7)
CHANNELS = 8
# The bias of one entry of each head, and the form that is exact for it.
FORMS = {'difference': 2.0, 'additive': -30.0, 'exact': -75.0}


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'eager')


def make_mixer(**options):
    return AFTConv(
        CHANNELS, num_heads=4, kernel_size=(3, 3), reparameterize=False, **options
    ).eval()


@torch.no_grad()
def set_bias(mixer, form):
    mixer.pos_bias.weight.normal_(std=0.5)
    mixer.pos_bias.weight[:, 0, 1] = FORMS[form]


class Graphs(list):
    def __call__(self, graph, inputs):
        self.append(graph)
        return torch._dynamo.lookup_backend('aot_eager')(graph, inputs)

    def names(self):
        return ' '.join(str(node.target) for m in self[-1].modules() for node in nodes_of(m))


def nodes_of(module):
    return module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ()


def compile_mixer(dynamic=None, **options):
    mixer, graphs = make_mixer(**options), Graphs()
    return mixer, graphs, torch.compile(mixer, fullgraph=True, dynamic=dynamic, backend=graphs)


def by_oracle(mixer, x, **options):
    mixer = copy.deepcopy(mixer).double()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setenv(ENVIRONMENT_VARIABLE, 'reference')
        return mixer(x.double(), grid=GRID, **options)


def assert_near_oracle(mixer, got, x, **options):
    expected = by_oracle(mixer, x, **options)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=2e-4)


@torch.no_grad()
def assert_right(mixer, compiled, x):
    got = compiled(x, grid=GRID)
    assert_near_oracle(mixer, got, x)
    torch.testing.assert_close(got, mixer(x, grid=GRID), rtol=1e-5, atol=1e-5)


def tokens(key_scale=1.0):
    return torch.randn(2, GRID[0] * GRID[1], CHANNELS) * key_scale


@pytest.mark.parametrize('form', FORMS)
def test_the_graph_has_one_form(form):
    mixer, graphs, compiled = compile_mixer()
    set_bias(mixer, form)
    mixer.eval()
    for scale in (1.0, 50.0):  # the weights alone decide
        assert_right(mixer, compiled, tokens(scale))
    assert len(graphs) == 1 and 'cond' not in graphs.names()
    assert ('exact_conv_mean' in graphs.names()) == (form == 'exact')
    assert ('cumsum' in graphs.names()) == (form == 'additive')


def mixer_with(form):
    mixer = make_mixer()
    set_bias(mixer, form)
    return mixer


def by_loading(mixer, form):
    mixer.pos_bias.load_state_dict(mixer_with(form).pos_bias.state_dict())


def by_training(mixer, form):
    mixer.train()
    set_bias(mixer, form)
    mixer.eval()


@pytest.mark.parametrize(
    'write, dynamic', nightly([(by_loading, False), (by_training, True)], [(by_training, True)])
)
def test_a_written_kernel_changes_the_form(write, dynamic):
    mixer, graphs, compiled = compile_mixer(dynamic)
    x = tokens()
    assert_right(mixer, compiled, x)
    counts = []
    for form in ('exact', 'additive', 'difference'):
        write(mixer, form)
        assert_right(mixer, compiled, x)
        assert 'cond' not in graphs.names()
        counts.append(len(graphs))
    assert counts[2] == counts[1]  # the first graph fits again
    assert dynamic or counts == [2, 3, 3]  # with symbolic sizes a compilation may start twice


def by_numpy(mixer, form):
    mixer.pos_bias.weight.detach().numpy()[...] = mixer_with(form).pos_bias.weight.detach().numpy()


def test_a_write_without_eval_is_detected(monkeypatch):
    """The graph computes the mean again where its form is not exact."""
    mixer, graphs, compiled = compile_mixer()
    x, repeats, safe = tokens(50.0), [], conv.safe_conv_mean
    monkeypatch.setattr(conv, 'safe_conv_mean', lambda *x: repeats.append(1) or safe(*x))
    key_mask = torch.rand(x.shape[:2]) < 0.7
    counts = []

    def run():
        repeats.clear()
        with torch.no_grad():
            got = compiled(x, grid=GRID, key_mask=key_mask)
        counts.append(len(repeats))
        assert_near_oracle(mixer, got, x, key_mask=key_mask)

    run(), run()
    for form in FORMS:
        by_numpy(mixer, form)
        run()
    mixer.eval()
    run(), run()
    assert counts == [0, 0, 0, 1, 1, 0, 0]
    assert len(graphs) <= 2


@pytest.mark.parametrize('options', [dict(causal=True), dict(global_connectivity=False)], ids=str)
def test_keys_still_decide_where_rows_see_other_keys(options):
    mixer, graphs, compiled = compile_mixer(**options)
    for scale in (1.0, 200.0):
        x = tokens(scale)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, grid=GRID), mixer(x, grid=GRID))
    assert len(graphs) == 1 and 'cond' in graphs.names()


def test_training_in_a_graph_chooses_by_value():
    mixer, graphs, compiled = compile_mixer()
    compiled(tokens(), grid=GRID).sum().backward()
    assert 'cond' in graphs.names()


def test_the_form_is_unknown_without_values_and_in_copies():
    bias = make_mixer().pos_bias
    assert bias._form == 'difference'
    for other in (copy.deepcopy(bias), pickle.loads(pickle.dumps(bias)), bias.train()):
        assert other._form is None
    assert copy.deepcopy(bias).to('meta').eval()._form is None
    assert bias.eval().plan().form is None  # without a graph values are read


@pytest.mark.parametrize('kernel', [(3,), (9,), (3, 5), (11, 11), (3, 3, 3)], ids=str)
@pytest.mark.parametrize('form', FORMS)
def test_a_form_is_exact_on_every_grid(kernel, form, monkeypatch):
    weight = torch.randn(2, *kernel) * 0.5
    weight.flatten(1)[:, 0] = FORMS[form]
    plan = ops.ConvPlan(weight, form=form)
    assert plan.fastest_form() == form
    for grid in ((4, 3, 5)[: len(kernel)], (1, 7, 2)[: len(kernel)]):
        query, value = torch.randn(2, 2, math.prod(grid), 4)
        key = 50 * torch.randn(2, math.prod(grid), 2)
        inputs = query, key, value, weight
        options = dict(grid=grid, global_connectivity=True, causal=False, gate='sigmoid')
        options['key_mask'] = torch.rand(2, math.prod(grid)) < 0.8
        with torch.no_grad(), monkeypatch.context() as patch:
            patch.setattr(torch.compiler, 'is_compiling', lambda: True)
            got = conv.aft_conv(*inputs, plan=plan, **options)
        expected = reference.aft_conv(*inputs, **options)
        torch.testing.assert_close(got.double(), expected.double(), rtol=1e-4, atol=1e-5)


def test_a_model_is_compiled_again_once_for_all_layers():
    model = nn.ModuleList(make_mixer() for _ in range(3))

    def run(x):
        for mixer in model:
            x = mixer(x, grid=GRID)
        return x

    graphs = Graphs()
    compiled = torch.compile(run, fullgraph=True, backend=graphs)
    x = tokens()
    with torch.no_grad():
        for form in ('difference', 'additive', 'difference'):
            for mixer in model:
                set_bias(mixer, form)
            model.eval()
            torch.testing.assert_close(compiled(x), run(x), rtol=1e-4, atol=1e-5)
    assert len(graphs) == 2
