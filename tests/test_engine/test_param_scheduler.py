"""InverseSqrtLR."""

import math

import pytest
import torch
from mmengine.optim import LinearLR

from aft_mm.engine import InverseSqrtLR
from aft_mm.registry import PARAM_SCHEDULERS


def schedule(optimizer):
    return [
        LinearLR(optimizer, start_factor=0.01, begin=0, end=7, by_epoch=False),
        InverseSqrtLR(optimizer, begin=7),
    ]


def make_optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-3)


def rates(optimizer, schedulers, steps):
    values = []
    for _ in range(steps):
        values.append(optimizer.param_groups[0]['lr'])
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    return values


def test_peak_times_inverse_square_root_after_the_warm_up():
    optimizer = make_optimizer()
    found = rates(optimizer, schedule(optimizer), 100)
    assert found[0] == pytest.approx(3e-5) and found[:7] == sorted(found[:7])
    # A linear warm-up has the whole rate in its last iteration.
    assert found[6] == pytest.approx(3e-3)
    assert found[7:] == pytest.approx([3e-3 * math.sqrt(7 / t) for t in range(7, 100)])


@pytest.mark.parametrize('stop', [3, 7, 8, 50])
def test_a_resumed_schedule_continues(stop):
    whole_optimizer, optimizer, resumed = make_optimizer(), make_optimizer(), make_optimizer()
    whole = rates(whole_optimizer, schedule(whole_optimizer), 100)
    first, second = schedule(optimizer), schedule(resumed)
    rates(optimizer, first, stop)
    resumed.load_state_dict(optimizer.state_dict())
    for old, new in zip(first, second, strict=True):
        new.load_state_dict(old.state_dict())
    assert rates(resumed, second, 100 - stop) == pytest.approx(whole[stop:])


def test_a_config_finds_it_and_it_needs_a_warm_up():
    build = PARAM_SCHEDULERS.build
    settings = dict(type='aft_mm.InverseSqrtLR', optimizer=make_optimizer())
    assert isinstance(build(dict(settings, begin=1)), InverseSqrtLR)
    with pytest.raises(ValueError, match='begin of InverseSqrtLR must be .* got 0'):
        build(dict(settings, begin=0))
