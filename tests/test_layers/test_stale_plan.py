"""Evaluation of AFT-conv after writes to its position bias that no version counter sees.

Each result is that of a module built from the w of the changed one.
"""

import copy
import io
import pickle
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from mmengine.hooks import EMAHook
from mmengine.model import ExponentialMovingAverage
from torch import nn
from torch.nn.utils import parametrize as parametrizing

from aft_mm import ops
from aft_mm.layers import AFTConv
from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE

from ..helpers import nightly

pytestmark = pytest.mark.slow

GRID = (4, 5)
X = torch.randn(2, 20, 8, generator=torch.Generator().manual_seed(0))
# Standard deviations of w for which the difference, the additive and the exact form are exact.
FORMS = {'difference': 0.5, 'additive': 4.0, 'exact': 40.0}


def build(scale: float = 0.5, seed: int = 0, **options) -> AFTConv:
    torch.manual_seed(seed)
    mixer = AFTConv(8, num_heads=4, kernel_size=3, grid=GRID, **options)
    for parameter in mixer.pos_bias.parameters():
        nn.init.normal_(parameter)
    with torch.no_grad():
        mixer.pos_bias.gamma.fill_(scale)
    return mixer.eval()


@torch.no_grad()
def rebuilt(mixer: AFTConv, x=X) -> torch.Tensor:
    """Return the output of a new module whose w is a parameter without reparameterisation."""
    other = AFTConv(8, num_heads=4, kernel_size=3, grid=GRID, reparameterize=False)
    state = {name: p for name, p in mixer.state_dict().items() if 'pos_bias' not in name}
    state['pos_bias.weight'] = mixer.pos_bias().detach().clone()
    other.load_state_dict(state)
    return other.eval()(x)


def compiled(mixer):
    torch._dynamo.reset()
    return torch.compile(mixer, fullgraph=True, backend='aot_eager')


EVALUATIONS = {
    'default': (lambda mixer: mixer, None),
    'eager': (lambda mixer: mixer, 'eager'),
    'compiled': (compiled, None),
    'compiled eager': (compiled, 'eager'),
}


def assert_right(evaluate, mixer) -> None:
    with torch.no_grad():
        got = evaluate(X)
    torch.testing.assert_close(got, rebuilt(mixer), rtol=1e-5, atol=1e-5)


def values_of(bias, scale: float) -> list[torch.Tensor]:
    """Return other values of weight, γ and β."""
    other = build(scale, seed=1).pos_bias
    return [p.detach().contiguous() for p in (other.weight, other.gamma, other.beta)]


def copied(write, bias, scale) -> None:
    """Write other values by ``write(parameter, value)``."""
    for x, value in zip(bias.parameters(), values_of(bias, scale), strict=True):
        write(x, value)


def by_numpy(x, value) -> None:
    x.detach().numpy()[...] = value.numpy()


def by_swap(x, value) -> None:
    torch.utils.swap_tensors(x, nn.Parameter(value.clone()))


def by_data_twice(x, value) -> None:
    """The second tensor may reuse the memory of the first."""
    x.data = torch.randn_like(x)
    x.data = value.clone()


def by_fused_optimizer(bias, scale) -> None:
    parameters = list(bias.parameters())
    for x, value in zip(parameters, values_of(bias, scale), strict=True):
        x.grad = x.detach() - value
    torch.optim.AdamW(parameters, lr=2.0, fused=True).step()


def by_loading(bias, scale) -> None:
    bias.load_state_dict(build(scale, seed=1).pos_bias.state_dict())


def by_assigning(bias, scale) -> None:
    bias.load_state_dict(build(scale, seed=1).pos_bias.state_dict(), assign=True)


def by_replacing(bias, scale) -> None:
    for name, value in zip(('weight', 'gamma', 'beta'), values_of(bias, scale), strict=True):
        setattr(bias, name, nn.Parameter(value))


def by_views(bias, scale) -> None:
    by_replacing(bias, scale)
    bias.weight = nn.Parameter(bias.weight.detach().mT)


def by_averages(bias, scale) -> None:
    """mmengine's EMA hook, whose loop calls eval."""
    hook, runner = EMAHook(), SimpleNamespace(model=bias)
    hook.src_model, hook.ema_model = bias, ExponentialMovingAverage(bias)
    by_loading(hook.ema_model.module, scale)
    hook.before_val_epoch(runner)
    bias.eval()


# The plan compares all values, so one write past the version counters is of the kind of the others.
WRITERS = {write.__name__: partial(copied, write) for write in (by_numpy, by_swap, by_data_twice)}
OTHERS = by_fused_optimizer, by_loading, by_assigning, by_replacing, by_views, by_averages
WRITERS |= {f.__name__: f for f in OTHERS}


# Compiled, an optimizer and a write through numpy are of every other kind.
COMPILED = [('by_fused_optimizer', 'compiled eager'), ('by_numpy', 'compiled')]
COMPILED += [('hook', 'compiled eager'), ('parametrize', 'compiled')]


@pytest.mark.parametrize(
    'writer, evaluation',
    nightly(
        product(WRITERS, EVALUATIONS),
        lambda *case: case[1].startswith('compiled') and case not in COMPILED,
    ),
)
def test_a_write_acts(writer, evaluation, monkeypatch):
    make, backend = EVALUATIONS[evaluation]
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, backend or '')
    mixer = build()
    evaluate = make(mixer)
    for scale in FORMS.values():
        assert_right(evaluate, mixer)
        before = rebuilt(mixer)
        WRITERS[writer](mixer.pos_bias, scale)
        assert not torch.allclose(rebuilt(mixer), before, atol=1e-3)
        for _ in range(2):
            assert_right(evaluate, mixer)
        with torch.inference_mode():
            torch.testing.assert_close(evaluate(X), rebuilt(mixer), rtol=1e-5, atol=1e-5)
        mixer.pos_bias.load_state_dict(build().pos_bias.state_dict())


def set_tau(bias) -> None:
    bias.tau = 0.5


def hook(bias) -> None:
    bias.register_forward_hook(lambda module, args, output: -2 * output)


def pre_hook(bias) -> None:
    def negate(module, args):
        module.gamma.data.neg_()

    bias.register_forward_pre_hook(negate)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def parametrize(bias) -> None:
    parametrizing.register_parametrization(bias, 'gamma', Doubled())


def parametrize_and_write(bias) -> None:
    parametrize(bias)
    bias.parametrizations.gamma.original.data.neg_()


CHANGES = {f.__name__: f for f in (set_tau, hook, parametrize, parametrize_and_write)}


@pytest.mark.parametrize(
    'change, evaluation',
    nightly(
        product(CHANGES, EVALUATIONS),
        lambda *case: case[1].startswith('compiled') and case not in COMPILED,
    ),
)
def test_a_change_of_the_module_acts(change, evaluation, monkeypatch):
    make, backend = EVALUATIONS[evaluation]
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, backend or '')
    # As for any module, torch.compile otherwise ignores hooks that are added later.
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        mixer = build()
        evaluate = make(mixer)
        assert_right(evaluate, mixer)
        before = rebuilt(mixer)
        CHANGES[change](mixer.pos_bias)
        assert not torch.allclose(rebuilt(mixer), before, atol=1e-3)
        for _ in range(2):
            assert_right(evaluate, mixer)


@torch.no_grad()
def test_a_hook_runs_in_every_call():
    mixer, calls = build(), []
    mixer(X), mixer(X)
    mixer.pos_bias.register_forward_pre_hook(lambda *args: calls.append(1))
    mixer(X), mixer(X)
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    mixer(X)
    handle.remove()
    assert len(calls) == 3


@pytest.mark.parametrize('evaluation', nightly(EVALUATIONS, ['compiled']))
@torch.no_grad()
def test_functional_call_uses_its_parameters(evaluation, monkeypatch):
    make, backend = EVALUATIONS[evaluation]
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, backend or '')
    mixer = build()
    before = rebuilt(mixer)

    def run(state, x):
        return torch.func.functional_call(mixer, state, (x,))

    evaluate = make(run)
    mixer(X)
    for scale in FORMS.values():
        other = build(scale, seed=1)
        for state in (other.state_dict(), dict(other.named_parameters())):
            torch.testing.assert_close(evaluate(state, X), rebuilt(other), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mixer(X), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('duplicate', [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@torch.no_grad()
def test_a_copy_of_a_module_with_a_plan_is_independent(duplicate):
    mixer = build()
    mixer(X), mixer(X)
    twin = duplicate(mixer)
    before = rebuilt(mixer)
    copied(by_numpy, twin.pos_bias, FORMS['additive'])
    assert_right(twin, twin)
    torch.testing.assert_close(mixer(X), before, rtol=0, atol=0)
    assert not torch.allclose(twin(X), before, atol=1e-3)


def export(mixer, replay: bool) -> bytes:
    """Return the file of a program."""
    file = io.BytesIO()
    with torch.no_grad():
        with ops.record_paths() as paths:
            mixer(X)
        if replay:
            with ops.replay_paths(paths):
                program = torch.export.export(mixer, (X,), strict=False)
        else:
            program = torch.export.export(mixer, (X,), strict=True).run_decompositions({})
    torch.export.save(program, file)
    return file.getvalue()


def loaded(file: bytes):
    return torch.export.load(io.BytesIO(file)).module()


@pytest.mark.parametrize(
    'replay, form', [(False, 'additive'), (True, 'difference'), (True, 'exact')]
)
def test_an_export_has_the_parameters_of_now(replay, form):
    mixer = build()
    mixer(X)
    copied(by_numpy, mixer.pos_bias, FORMS[form])
    assert_right(loaded(export(mixer, replay)), mixer)


@pytest.mark.parametrize('replay', [False, True])
def test_a_write_to_a_loaded_export_acts(replay):
    """With the paths of a run it computes their form."""
    program = loaded(export(build(), replay))
    for writer in ('by_numpy', 'by_fused_optimizer'):
        for form in FORMS if not replay else ['difference']:
            mixer = build()
            program.pos_bias.load_state_dict(mixer.pos_bias.state_dict())
            assert_right(program, mixer)
            for module in (mixer, program):
                WRITERS[writer](module.pos_bias, FORMS[form])
            assert_right(program, mixer)
