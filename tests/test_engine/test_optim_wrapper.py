"""AutocastOptimWrapper."""

import pytest
import torch
from mmengine.optim import OptimWrapper
from torch import nn

from aft_mm.engine import AutocastOptimWrapper


def wrapper(model, **kwargs):
    return AutocastOptimWrapper(optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **kwargs)


def step(wrap, model, x):
    with wrap.optim_context(model):
        loss = model(x).float().square().mean()
    wrap.update_params(loss)
    return loss


def test_linear_layers_run_in_bfloat16_only_inside_the_context():
    model, x = nn.Linear(7, 3), torch.randn(5, 7)
    with wrapper(model).optim_context(model):
        assert model(x).dtype == torch.bfloat16
    assert model(x).dtype == torch.float32


def test_a_step_is_the_step_of_plain_autocast():
    torch.manual_seed(0)
    model, x = nn.Linear(7, 3), torch.randn(5, 7)
    twin = nn.Linear(7, 3)
    twin.load_state_dict(model.state_dict())
    step(wrapper(model, clip_grad=dict(max_norm=0.1)), model, x)

    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    with torch.autocast('cpu', torch.bfloat16):
        loss = twin(x).float().square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    optimizer.step()
    assert torch.equal(model.weight, twin.weight) and torch.equal(model.bias, twin.bias)


def test_accumulated_gradients_step_once_in_two():
    model, x = nn.Linear(7, 3), torch.randn(5, 7)
    wrap = wrapper(model, accumulative_counts=2)
    before = model.weight.clone()
    step(wrap, model, x)
    assert torch.equal(model.weight, before)
    step(wrap, model, x)
    assert not torch.equal(model.weight, before)


def test_state_goes_to_and_comes_from_a_plain_wrapper():
    model, x = nn.Linear(7, 3), torch.randn(5, 7)
    plain = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    step(plain, model, x)
    wrap = wrapper(model)
    wrap.load_state_dict(plain.state_dict())
    assert wrap.get_lr()['lr'] == [0.5]
    plain.load_state_dict({k: v for k, v in wrap.state_dict().items() if k != 'loss_scaler'})


@pytest.mark.skipif(torch.cuda.is_available(), reason='float16 is allowed on CUDA')
def test_float16_on_a_cpu_is_named():
    with pytest.raises(ValueError, match='must be one of bfloat16, got .float16'):
        wrapper(nn.Linear(7, 3), dtype='float16')


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize(
    ('loss_scale', 'scale'), [('dynamic', 2.0**16), (512.0, 512.0), (dict(init_scale=8.0), 8.0)]
)
def test_float16_scales_the_loss_and_saves_the_scale(loss_scale, scale):
    model, x = nn.Linear(7, 3).cuda(), torch.randn(5, 7, device='cuda')
    wrap = wrapper(model, dtype='float16', loss_scale=loss_scale)
    step(wrap, model, x)
    state = wrap.state_dict()
    assert state['loss_scaler']['scale'] == scale
    other = wrapper(model, dtype='float16')
    other.load_state_dict(state)
    assert other.loss_scaler.get_scale() == scale


@pytest.mark.parametrize('loss_scale', ['512', 0, -1.0])
def test_a_bad_loss_scale_is_refused(loss_scale):
    with pytest.raises(ValueError, match='loss_scale of AutocastOptimWrapper must be a finite'):
        wrapper(nn.Linear(7, 3), loss_scale=loss_scale)
