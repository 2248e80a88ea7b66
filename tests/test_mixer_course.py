"""docs/tutorials/mixer_course.ipynb: its cells run, and show what its text says."""

import json
import math
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch

from aft_mm.layers import Block

NOTEBOOK = Path(__file__).parents[1] / 'docs/tutorials/mixer_course.ipynb'


@pytest.fixture(scope='module')
def course():
    """Return the names of the notebook after all its cells."""
    threads, names = torch.get_num_threads(), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plt, 'show', lambda: None)
        for cell in json.loads(NOTEBOOK.read_text())['cells']:
            if cell['cell_type'] == 'code':
                assert not cell['outputs']
                exec(''.join(cell['source']), names)
    plt.close('all')
    torch.set_num_threads(threads)
    return names


def test_each_attempt_fails_where_the_text_says(course):
    failures = course['failures']
    assert failures['by_formula'] == failures['right'] == []
    assert {'large keys', 'small biases'} <= set(failures['bare'])
    assert 'distances' in failures['clamped']
    assert failures['shifted'] == ['causal, large keys', 'large keys and biases']


def test_only_mixers_with_a_position_bias_find_the_offset(course):
    torch.manual_seed(1)
    symbols, accuracies = course['make_sequences'](64), {}
    for name, model in course['models'].items():
        assert isinstance(model.block, Block)
        found = model(symbols[:, :-1]).argmax(-1)[:, course['LAG'] :]
        accuracies[name] = (found == symbols[:, course['LAG'] + 1 :]).float().mean()
    assert accuracies['AFT-full'] > 0.95 and accuracies['AFT-conv'] > 0.95
    assert accuracies['AFT-simple'] < 0.7 and accuracies['attention'] < 0.7
    assert course['strongest'] == 1 - course['LAG']


def test_memory_grows_with_the_length_as_the_text_says(course):
    lengths, curves = course['lengths'], course['curves']
    growth = {
        name: math.log(sizes[-1] / sizes[-2], lengths[-1] / lengths[-2])
        for name, sizes in curves.items()
    }
    assert growth['by_formula'] > 1.9 and growth['simple'] < 1.1
    assert curves['by_formula'][-1] > 30 * curves['right'][-1]


def test_the_state_of_aft_simple_does_not_grow(course):
    simple, attention = course['sizes']['AFTSimple'], course['sizes']['SoftmaxAttention']
    assert simple[0] == simple[-1] == 3 * course['D']
    assert attention[-1] > simple[-1]
