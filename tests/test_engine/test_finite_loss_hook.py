"""FiniteLossHook."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from mmengine.logging import MessageHub
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper, OptimWrapperDict
from torch import nn

from aft_mm.engine import AutocastOptimWrapper, FiniteLossHook
from aft_mm.errors import UserError


class Model(BaseModel):
    """``loss = mean((W x + b)²) · factor``, with a part that no loss reaches."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x, factor=1.0, mode='tensor'):
        y = self.layer(x).float()
        # The square root's gradient at 0 is infinite while the loss is finite.
        loss = y.square().mean() * factor if factor else y.sub(y.detach()).square().sum().sqrt()
        return dict(loss=loss) if mode == 'loss' else y


class Run:
    def __init__(self, wrapper=OptimWrapper, watch=True, model=Model, **kwargs):
        torch.manual_seed(0)
        self.model = model()
        groups = [
            dict(params=self.model.layer.parameters()),
            dict(params=self.model.unused.parameters(), lr=0.025),
        ]
        self.optim_wrapper = wrapper(optimizer=torch.optim.SGD(groups, lr=0.05), **kwargs)
        hub = MessageHub('test')
        hub.update_info('last_ckpt', 'work_dirs/epoch_3.pth')
        self.runner = SimpleNamespace(
            model=self.model, optim_wrapper=self.optim_wrapper, message_hub=hub, iter=0
        )
        self.hook = FiniteLossHook()
        if watch:
            self.hook.before_train(self.runner)

    def step(self, factor=1.0, seed=0):
        x = torch.randn(7, 5, generator=torch.Generator().manual_seed(seed))
        outputs = self.model.train_step(dict(x=x, factor=factor), self.optim_wrapper)
        self.hook.after_train_iter(self.runner, self.runner.iter, outputs=outputs)
        self.runner.iter += 1

    def weights(self):
        return {name: value.clone() for name, value in self.model.state_dict().items()}


RUNS = dict(
    plain=Run,
    clipped=partial(Run, clip_grad=dict(max_norm=0.1)),
    bfloat16=partial(Run, AutocastOptimWrapper),
)


@pytest.fixture(params=RUNS)
def training(request):
    return RUNS[request.param]()


def test_a_compiled_training_step_is_watched():
    """mmengine's ``compile`` compiles train_step, and with it the step of the optimizer."""
    run = Run()
    run.model.train_step = torch.compile(run.model.train_step, backend='eager')
    for seed in range(4):
        run.step(seed=seed)
    before = run.weights()
    with pytest.raises(UserError, match='the loss of iteration 5 is inf'):
        run.step(factor=float('inf'))
    assert all(torch.equal(before[name], value) for name, value in run.weights().items())


@pytest.mark.parametrize('name', RUNS)
def test_finite_training_is_not_changed(name):
    watched, plain = RUNS[name](), RUNS[name](watch=False)
    for seed in range(3):
        watched.step(seed=seed)
        plain.step(seed=seed)
    for key, value in plain.weights().items():
        assert torch.equal(watched.weights()[key], value), key


@pytest.mark.parametrize(('factor', 'loss'), [(float('nan'), 'nan'), (float('inf'), 'inf')])
def test_a_non_finite_loss_stops_before_the_step(training, factor, loss):
    for seed in range(4):
        training.step(seed=seed)
    before = training.weights()
    with pytest.raises(UserError) as error:
        training.step(factor)
    message = str(error.value)
    assert f'the loss of iteration 5 is {loss} at a learning rate of 0.05' in message
    assert re.search(r'its largest gradient is (nan|inf) of layer\.(weight|bias)', message)
    assert message.endswith('the last checkpoint is work_dirs/epoch_3.pth')
    assert '\n' not in message
    for name, value in training.weights().items():
        assert torch.equal(value, before[name]), name


def test_the_gradients_are_those_before_clipping():
    run = Run(clip_grad=dict(max_norm=1e-3))
    run.step(1000.0)
    with pytest.raises(UserError) as error:
        run.step(float('nan'))
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    model = Run().model
    (1000 * model(x).square().mean()).backward()
    largest = max(
        (value.grad.abs().max().item(), name) for name, value in model.layer.named_parameters()
    )
    expected = 'that of the previous step was {:.6g} of layer.{};'.format(*largest)
    assert expected in str(error.value)


def test_an_infinite_gradient_of_a_finite_loss_stops_too(training):
    training.step()
    before = training.weights()
    with pytest.raises(UserError, match=r'the loss of iteration 2 is 0 at .* gradient is nan of'):
        training.step(0.0)
    assert torch.equal(training.weights()['layer.weight'], before['layer.weight'])


def test_the_first_iteration_that_only_accumulates_is_watched_and_has_no_previous_step():
    run = Run(accumulative_counts=2)
    run.runner.message_hub = MessageHub('empty')
    message = 'loss of iteration 1 is nan .* that of the previous step was none; .* is none yet'
    with pytest.raises(UserError, match=message):
        run.step(float('nan'))


class OwnStep(Model):
    """A model whose train_step computes the loss by itself, or from a model that returns a tensor."""

    mode = 'tensor'

    def forward(self, x, factor=1.0, mode='tensor'):
        return super().forward(x).square().mean() * factor

    def train_step(self, data, optim_wrapper):
        outputs = dict(loss=self(**data, mode=self.mode), loss_of_part=1.0)
        optim_wrapper.update_params(outputs['loss'])
        return outputs


@pytest.mark.parametrize(('mode', 'loss'), [('tensor', 'unknown'), ('loss', 'nan')])
def test_a_step_of_the_model_itself_is_watched(mode, loss, monkeypatch):
    monkeypatch.setattr(OwnStep, 'mode', mode)
    run = Run(model=OwnStep)
    for seed in range(4):
        run.step(seed=seed)
    before = run.weights()
    with pytest.raises(UserError, match=f'^the loss of iteration 5 is {loss} .* is nan of layer'):
        run.step(float('nan'))
    assert all(torch.equal(before[name], value) for name, value in run.weights().items())
    run = Run(model=OwnStep, accumulative_counts=2)
    with pytest.raises(UserError, match='^the loss of iteration 1 is nan'):
        run.step(float('nan'))


class OwnLosses(Model):
    def forward(self, x, factor=1.0, mode='tensor'):
        output = super().forward(x, factor, mode)
        return dict(output, weight=torch.tensor(2.0), text='a') if mode == 'loss' else output

    def parse_losses(self, losses):
        return losses['weight'] * losses['loss'], {}


def test_a_model_may_add_its_losses_itself():
    run = Run(model=OwnLosses)
    run.step()
    with pytest.raises(UserError, match='^the loss of iteration 2 is nan'):
        run.step(float('nan'))


@pytest.mark.parametrize('bad', [0, 1])
def test_the_step_of_each_of_several_optimizers_is_watched(bad):
    run = Run(watch=False)
    layers = dict(layer=run.model.layer, unused=run.model.unused)
    wrappers = {
        name: OptimWrapper(torch.optim.SGD(layer.parameters(), rate))
        for (name, layer), rate in zip(layers.items(), (0.1, 0.2), strict=True)
    }
    run.runner.optim_wrapper = OptimWrapperDict(**wrappers)
    run.hook.before_train(run.runner)

    def step(factors):
        for (name, layer), factor in zip(layers.items(), factors, strict=True):
            loss = layer(torch.ones(1, layer.in_features)).square().sum()
            wrappers[name].update_params(loss * factor)
        run.hook.after_train_iter(run.runner, 0, outputs=dict(other=1))

    step([1.0, 1.0])
    before = run.weights()
    factors = [1.0, 1.0]
    factors[bad] = float('nan')
    with pytest.raises(UserError, match='unknown at a learning rate of 0.2; its largest .* nan of'):
        step(factors)
    name = f'{list(layers)[bad]}.weight'
    assert torch.equal(run.weights()[name], before[name])
