"""Other code's names for AFT, and the test file that finds the usual faults of an AFT."""

import subprocess
import sys

import pytest
import torch

from aft_mm import compat
from aft_mm.ops import aft_full

from .documents import blocks
from .helpers import ROOT, load_script

CHECK = 'examples/check_aft/test_my_aft'


def bare_exp(q, k, v, w):
    w = w.exp()
    return q.sigmoid() * (w @ (k.exp() * v)) / (w @ k.exp())


def zero_for_nan(q, k, v, w):
    w = w.exp()
    above, below = w @ (k.exp() * v), w @ k.exp()
    mixed = above / below
    if above.isinf().any() or below.isinf().any():
        mixed = above.nan_to_num() / below.nan_to_num()
    return q.sigmoid() * mixed.nan_to_num()


def clamped(q, k, v, w):
    w = w.clamp(-50, 50).exp()
    k = (k - k.amax(1, keepdim=True)).exp()
    return q.sigmoid() * (w @ (k * v)) / (w @ k + 1e-8)


def two_softmaxes(q, k, v, w):
    return q.sigmoid() * (w.softmax(-1) @ (k.softmax(1) * v))


def largest_of_all_tokens(q, k, v, w):
    w = w.exp()
    k = (k - k.amax(1, keepdim=True)).exp()
    return q.sigmoid() * (w @ (k * v)) / (w @ k + 1e-9)


def largest_of_each_key(q, k, v, w):
    w = (w - w.amax(-2, keepdim=True)).exp()
    k = (k - k.amax(1, keepdim=True)).exp()
    return q.sigmoid() * (w @ (k * v)) / (w @ k)


def largest_of_keys_and_of_rows(q, k, v, w):
    w = (w - w.amax(-1, keepdim=True)).exp()
    k = (k - k.amax(1, keepdim=True)).exp()
    return q.sigmoid() * (w @ (k * v)) / (w @ k)


def without_a_gate(q, k, v, w):
    return (k[:, None] + w[..., None]).softmax(2).mul(v[:, None]).sum(2)


def without_a_sum(q, k, v, w):
    return q.sigmoid() * (k.exp() * v) / k.exp()


def multiplied_bias(q, k, v, w):
    k = (k - k.amax(1, keepdim=True)).exp()
    return q.sigmoid() * (w @ (k * v)) / (w @ k)


BOTH = {'causal, large keys', 'large keys and biases'}
EXTREME = {'small biases', 'large biases', *BOTH}
OVERFLOW = {'large keys', 'shifted keys', 'half', *EXTREME}
ALL = {'plain', 'no bias', 'hidden pairs', 'causal', 'distances', *OVERFLOW}
FAULTS = {
    bare_exp: OVERFLOW | {'late key'},
    zero_for_nan: OVERFLOW | {'late key'},
    clamped: {'distances', 'late key', 'leak', *EXTREME},
    two_softmaxes: ALL | {'late key', 'leak', 'gate'},
    largest_of_all_tokens: {'distances', 'late key', 'leak', *EXTREME},
    largest_of_each_key: ALL | {'late key', 'leak'},
    largest_of_keys_and_of_rows: BOTH | {'late key'},
    without_a_gate: ALL | {'gate'},
    without_a_sum: ALL | {'leak', 'keys'},
    multiplied_bias: ALL | {'late key', 'leak'},
}


@pytest.fixture
def check():
    return load_script(CHECK)


def found_by(check, aft):
    """Return the tests of the file that an AFT fails, with their messages."""
    check.aft = aft
    tests = {name: (check.test_outputs_and_gradients, name) for name in check.FAULTS}
    tests |= {
        'late key': (check.test_a_late_key_does_not_change_the_past,),
        'leak': (check.test_a_hidden_token_leaks_nothing,),
        'gate': (check.test_a_constant_value_is_gated,),
        'keys': (check.test_the_keys_matter,),
        'half': (check.test_half_precision, torch.float16),
    }
    failed = {}
    for name, (test, *arguments) in tests.items():
        try:
            test(*arguments)
        except AssertionError as error:
            failed[name] = str(error)
    return failed


@pytest.mark.parametrize('aft', FAULTS, ids=lambda aft: aft.__name__)
def test_the_file_finds_the_usual_faults(check, aft):
    found = found_by(check, aft)
    assert found.keys() == FAULTS[aft]
    assert 'CAUSAL' not in str(found)


def test_a_function_that_is_always_causal_is_compared_with_causal_sums(check, monkeypatch):
    def causal(q, k, v, w):
        return aft_full(q, k, v, check.causal(w).expand(len(k), -1, -1))

    found = found_by(check, causal)
    assert {'plain', 'hidden pairs', 'distances', 'half'} <= found.keys()
    for name in found.keys() - {'half'}:
        assert found[name].startswith('matches the causal function: set CAUSAL = True'), name
    monkeypatch.setattr(check, 'CAUSAL', True)
    assert not found_by(check, causal)
    found = found_by(check, lambda q, k, v, w: bare_exp(q, k, v, check.causal(w)))
    assert found.keys() == FAULTS[bare_exp] | {'distances'}  # a single one in the first row


def test_a_module_is_tested_between_its_projections(check):
    block, _ = blocks('docs/is_your_aft_right.md', 'python')
    names = {}
    exec(block, names)
    assert not found_by(check, names['aft'])


def test_ours_has_none_of_them():
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', ROOT / f'{CHECK}.py'],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and '17 passed' in done.stdout, done.stdout


def given(tokens=7, channels=6, bias_offset=0.0):
    q, k, v = torch.randn(3, 2, tokens, channels)
    return q, k, v, torch.randn(2, tokens, tokens) + bias_offset


@pytest.mark.parametrize('offset', [0.0, -200.0])
def test_the_module_of_routing_solvers_is_exact_for_any_bias(offset):
    q, k, v, bias = given(bias_offset=offset)
    mask = torch.zeros_like(bias).masked_fill(torch.rand_like(bias) < 0.3, -torch.inf)
    mask[:, 2] = -torch.inf  # a node that sees none
    found = compat.adaptation_attention_free_module(q, k, v, bias, mask)
    alike = zero_for_nan(q, k, v, bias + mask - offset)
    torch.testing.assert_close(found, alike)
    assert (found[:, 2] == 0).all()
    nearest = compat.adaptation_attention_free_module(q[:, :1], k, v, bias[:, :1])
    torch.testing.assert_close(nearest, bare_exp(q[:, :1], k, v, bias[:, :1] - offset))


@pytest.mark.parametrize('name', ['AFTFull', 'AFTSimple', 'AFTLocal'])
def test_checkpoints_of_aft_pytorch_give_the_same_outputs(name):
    original = pytest.importorskip('aft_pytorch.aft_pytorch', reason='aft-pytorch is the original')
    options = dict(max_seqlen=9, dim=5, hidden_dim=8)
    options |= dict(s=3) if name == 'AFTLocal' else {}
    theirs, ours = getattr(original, name)(**options), getattr(compat, name)(**options)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 7, 5)
    torch.testing.assert_close(ours(x), theirs(x))
    x = 1e3 * x
    assert ours(x).isfinite().all() and (name == 'AFTSimple' or not theirs(x).isfinite().all())


def test_the_window_of_aft_local_learns():
    layer = compat.AFTLocal(9, 5, 8, s=3)
    layer(torch.randn(2, 9, 5)).square().sum().backward()
    learns = layer.wbias.grad != 0
    index = torch.arange(9)
    assert torch.equal(learns, (index - index[:, None]).abs() < 3)


@pytest.mark.parametrize('simple', [True, False])
def test_aft_full_of_the_collection_equals_the_formula(simple):
    layer = compat.AFT_FULL(6, n=7, simple=simple)
    names = {'fc_q', 'fc_k', 'fc_v'} | (set() if simple else {'position_biases'})
    assert {name.partition('.')[0] for name in layer.state_dict()} == names
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 7, 6)
    bias = torch.zeros(7, 7) if simple else layer.position_biases
    qkv = layer.fc_q(x), layer.fc_k(x), layer.fc_v(x)
    torch.testing.assert_close(layer(x), bare_exp(*qkv, bias))


def test_a_mask_of_bools_is_no_bias():
    q, k, v, w = torch.randn(4, 1, 2, 2).unbind()
    hidden = torch.tensor([[[False, True], [False, True]]])
    found = compat.adaptation_attention_free_module(
        q, k, v, w, torch.zeros(1, 2, 2).masked_fill(hidden, -torch.inf)
    )
    torch.testing.assert_close(found, q.sigmoid() * v[:, :1])
    for mask in (hidden, hidden.long()):
        with pytest.raises(ValueError, match='ninf_mask must be a tensor of floats, 0 or −inf'):
            compat.adaptation_attention_free_module(q, k, v, w, mask)
