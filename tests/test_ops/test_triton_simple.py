"""The kernels of causal AFT-simple against the float64 oracle; see `triton_parity.py`."""

import pytest
import torch

from aft_mm import ops

from ..helpers import nightly
from .cases import CASES, run_with_gradients
from .triton_parity import DEVICE, INTERPRETED, MARKS, TERMS, compare, inputs

from aft_mm.ops.triton import simple  # isort: skip - where Triton is
from .kernel_cases import SHIPPED, spread_keys  # isort: skip
from .kernel_cases import causal_simple as causal  # isort: skip

pytestmark = MARKS


def cut_into_chunks(monkeypatch):
    monkeypatch.setattr(simple, 'SHORTEST_CHUNK', 16)
    monkeypatch.setattr(simple, 'count_processors', lambda device: 10**6)


SERVED = [case for case in CASES if case.op == 'aft_simple' and case.options.get('causal')]
SIZES = [*SERVED, causal(7, 6), causal(16, 1), causal(33, 21)]


@pytest.mark.parametrize('case', SIZES, ids=lambda case: case.name)
def test_matches_oracle(case, monkeypatch):
    if case.tokens > 16:
        cut_into_chunks(monkeypatch)
    batch = 2 if case.tokens < 10 else 1
    compare(case, inputs(case, batch), monkeypatch)


KEYS = {'softmax': 'sigmoid', 'relu': 'sigmoid', 'relu2': 'relu'}


TYPES = [
    ('softmax', torch.float16),
    ('softmax', torch.bfloat16),
    ('relu', torch.float32),
    ('relu', torch.bfloat16),
    ('relu2', torch.float16),
]


@pytest.mark.parametrize('key, dtype', nightly(TYPES, lambda key, dtype: key != 'softmax'))
def test_types(key, dtype, monkeypatch):
    case = causal(18, 6, key_function=key, gate=KEYS[key])
    compare(case, inputs(case, 1, dtype), monkeypatch)


@SHIPPED
def test_blocks_of_a_device_and_many_chunks(monkeypatch):
    cut_into_chunks(monkeypatch)
    case = causal(150, 40)
    tensors = inputs(case, 1)
    assert simple.plan_chunks(tensors[2])[1] == 3
    compare(case, tensors, monkeypatch)


# Steps at the ends of groups of 2 tokens, tiles of 8 and chunks of 16.
@pytest.mark.parametrize('chunked', [False, True])
@pytest.mark.parametrize('kind', ['huge', 'rising', 'lowest', 3, 16])
def test_keys_of_any_size(kind, chunked, monkeypatch):
    if chunked:  # by the kernel without units of tiles
        cut_into_chunks(monkeypatch)
        monkeypatch.setattr(simple, 'may_share_units', lambda value: False)
    case = causal(21)
    query, key, value = inputs(case, 1)
    compare(case, [query, spread_keys(kind, key), value], monkeypatch, TERMS)


@pytest.mark.parametrize(
    'slope, chunked', nightly([(3, False), (-3, True), (8, True)], [(8, True)])
)
def test_units_of_tiles(slope, chunked, monkeypatch):
    """Tiles of 16 tokens: by one unit if keys rise by 48 in a tile, each token by its own for 128."""
    if chunked:
        cut_into_chunks(monkeypatch)
    case = causal(40)
    query, key, value = inputs(case)
    rising = slope * torch.arange(40, device=DEVICE).view(1, -1, 1)
    mask = torch.ones(2, 40, dtype=torch.bool, device=DEVICE)
    mask[1, :20] = False
    tensors = [query, key + rising, value]
    compare(case, tensors, monkeypatch, TERMS, key_mask=mask)
    sum_tile, calls = simple.sum_tile, []
    if INTERPRETED:
        monkeypatch.setattr(simple, 'sum_tile', lambda *x: calls.append(1) or sum_tile(*x))
    got = run_with_gradients(case, tensors)
    assert bool(calls) == (INTERPRETED and slope < 8)
    monkeypatch.setattr(simple, 'may_share_units', lambda value: False)
    torch.testing.assert_close(run_with_gradients(case, tensors), got, rtol=1e-4, atol=1e-5)


CONFIG_SHAPES = {
    (16, 3072, 256): (3072, 1, 32, 128),
    (2, 3072, 256): (256, 12, 32, 16),
    (16, 1024, 512): (1024, 1, 32, 256),
    (8, 4096, 1024): (4096, 1, 32, 256),
    (64, 4096, 1024): (4096, 1, 64, 1024),
    (1, 16384, 256): (512, 32, 32, 8),
    (1, 100, 8): (128, 1, 32, 1),
}


@pytest.mark.parametrize('shape', CONFIG_SHAPES, ids=str)
def test_sequences_are_split_unless_they_fill_half_of_the_device(shape, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(simple, 'count_processors', lambda device: 132)
    value = torch.empty(shape, dtype=torch.bfloat16, device='meta')
    assert simple.plan_chunks(value) == CONFIG_SHAPES[shape]


def test_channel_offsets_are_64_bit():
    """Channel · stride beyond int32: three channels, 2^30 numbers apart, untouched in between."""
    stride = 2**30
    memory = torch.empty(2 * stride + 16, dtype=torch.float16, device=DEVICE)
    key = memory.as_strided((1, 9, 3), (9, 1, stride))
    key.copy_(torch.randn(1, 9, 3))
    plain = key.clone(memory_format=torch.contiguous_format)
    expected = ops.aft_simple(plain, plain, plain, causal=True)
    assert torch.equal(ops.aft_simple(key, key, key, causal=True), expected)


def test_torch_func_and_forward_mode_use_eager(monkeypatch):
    x, tangent = torch.randn(2, 1, 9, 3, device=DEVICE)

    def call(x):
        return ops.aft_simple(x, x, x, causal=True)

    with pytest.raises(RuntimeError, match='forward-mode differentiation need operations of torch'):
        torch.func.jvp(call, (x,), (tangent,))
    monkeypatch.setenv('AFT_MM_BACKEND', 'triton,eager')
    _, got = torch.func.jvp(call, (x,), (tangent,))
    step = 1e-3
    expected = (call(x + step * tangent) - call(x - step * tangent)) / (2 * step)
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-3)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        found = torch.autograd.forward_ad.unpack_dual(call(dual)).tangent
    torch.testing.assert_close(found, got)
    gradient = torch.func.grad(lambda x: call(x).sum())(x)
    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(call(leaf).sum(), leaf)
    torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-5)
