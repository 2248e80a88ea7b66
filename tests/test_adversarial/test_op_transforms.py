"""Second derivatives, torch.func, and NaN in every op."""

import pytest
import torch

from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE

from ..helpers import each
from ..test_ops.cases import CASES, CAUSAL_CASES, run_with_gradients
from ..test_ops.test_backends import assert_close

pytestmark = pytest.mark.adversarial

SMALL = [case for case in CASES if case.tokens <= 12 or case.name.startswith('local-130-s=5')]
# One of each op, causal or not; banded ones with several blocks.
VARIED = list({(case.op, case.options.get('causal')): case for case in reversed(SMALL)}.values())


def names(case):
    return case.name


@each('scale', [1, 100])
@pytest.mark.parametrize('case', VARIED, ids=names)
def test_second_derivatives(case, scale):
    """Compared with differences of gradients."""
    tensors = case.inputs(batch=1)
    with torch.no_grad():
        tensors[1].mul_(scale)
    cotangent = torch.randn(1, case.tokens, case.channels, dtype=torch.float64)
    directions = [torch.randn_like(x) for x in tensors]

    def slopes(*inputs):
        return torch.autograd.grad((case(*inputs) * cotangent).sum(), inputs, create_graph=True)

    def moved(step):
        inputs = [
            (x + step * way).detach().requires_grad_()
            for x, way in zip(tensors, directions, strict=True)
        ]
        return [slope.detach() for slope in slopes(*inputs)]

    weights = [torch.randn_like(x) for x in tensors]
    along = sum((slope * w).sum() for slope, w in zip(slopes(*tensors), weights, strict=True))
    second = torch.autograd.grad(along, tensors)
    got = sum((x * way).sum() for x, way in zip(second, directions, strict=True))
    pairs = zip(moved(1e-6), moved(-1e-6), weights, strict=True)
    expected = sum(((a - b) * w).sum() for a, b, w in pairs) / 2e-6
    assert abs(float(expected)) > 1e-9
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@each('scale', [1, 100])
@pytest.mark.parametrize('case', VARIED, ids=names)
def test_torch_func(case, scale):
    """vmap of an op and of its gradient are those of a loop; torch.func.grad is autograd's."""
    samples = [[x.detach() for x in case.inputs(batch=2)] for _ in range(3)]
    for sample in samples:
        sample[1] *= scale
    columns = [torch.stack(column) for column in zip(*samples, strict=True)]
    torch.testing.assert_close(
        torch.func.vmap(case)(*columns), torch.stack([case(*sample) for sample in samples])
    )
    # Gradients of each sample towards the parameters that samples share.
    shared = columns[3:] and samples[0][3:]
    dims = (0, 0, 0, *[None] * len(shared))
    cotangent = torch.randn(2, case.tokens, case.channels, dtype=torch.float64)

    def loss(*tensors):
        return (case(*tensors) * cotangent).sum()

    arguments = tuple(range(3 + len(shared)))
    got = torch.func.vmap(torch.func.grad(loss, arguments), dims)(*columns[:3], *shared)
    for i, sample in enumerate(samples):
        inputs = [x.clone().requires_grad_() for x in (*sample[:3], *shared)]
        for ours, theirs in zip(got, torch.autograd.grad(loss(*inputs), inputs), strict=True):
            torch.testing.assert_close(ours[i], theirs)
    # Gradients of several cotangents at once.
    output, cotangents = case(*inputs), torch.stack([cotangent, cotangent.flip(1)])
    ours = torch.autograd.grad(output, inputs, cotangents, True, is_grads_batched=True)
    rows = [torch.autograd.grad(output, inputs, row, True) for row in cotangents]
    torch.testing.assert_close(list(ours), [torch.stack(row) for row in zip(*rows, strict=True)])


@each('number', [torch.nan, torch.inf, -torch.inf])
@each('which', [1, 2])
@each('case', CAUSAL_CASES)
def test_what_is_no_number_leaves_the_rows_before_it_alone(case, which, number):
    tensors = [x.detach() for x in case.inputs(dtype=torch.float32)]
    before = case(*tensors)
    cut = 2 * case.tokens // 3
    tensors[which][0, cut, 0] = number
    for gradient in (False, True):
        got = case(*(x.requires_grad_(gradient) for x in tensors)).detach()
        torch.testing.assert_close(got[0, :cut], before[0, :cut], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got[1], before[1], rtol=1e-5, atol=1e-6)
        reach = case.channels // case.heads if which == 1 else 1  # channels that see it
        torch.testing.assert_close(got[0, :, reach:], before[0, :, reach:], rtol=1e-5, atol=1e-6)


@each('case', CASES)
def test_keys_as_large_as_float32_holds(case):
    tensors = [x.detach() for x in case.inputs(dtype=torch.float32)]
    if 'key_function' in case.options:
        return  # sums of relu(k) v, which may overflow
    tensors[1] = torch.where(tensors[1] > 0, 3e38, -3e38) * torch.rand_like(tensors[1])
    assert all(part.isfinite().all() for part in run_with_gradients(case, tensors))


@each('size', [1e8, 1e16, 1e30])
@each('case', CASES)
def test_biases_count_next_to_any_finite_key(case, size, monkeypatch):
    """At keys of 1e16 the float32 sum key + w loses w.

    Keys are −1, 0 or 1 times `size`, so the results equal those of −1e4, 0 and 1e4.
    """
    if case.options.get('key_function', 'softmax') != 'softmax':
        return
    query, key, value, *biases = (x.detach() for x in case.inputs(dtype=torch.float32))
    key = torch.randint_like(key, -1, 2)
    with monkeypatch.context() as patch:
        patch.setenv(ENVIRONMENT_VARIABLE, 'reference')
        wide = [x.double() for x in (query, 1e4 * key, value, *biases)]
        expected = run_with_gradients(case, wide)
    for given in ([query, size * key, value, *biases], [wide[0], size * key.double(), *wide[2:]]):
        got = run_with_gradients(case, given)
        assert_close(got, expected, 1e-5, floor=1.0)


@each('size', [87.0, 88.0, 600.0])
@each('case', [case for case in CASES if case.parameters])
def test_batch_in_which_every_key_is_hidden(case, size):
    """From w = 88 on, e^w is infinite in float32, and 0 · e^w NaN."""
    tensors = [x.detach() for x in case.inputs(dtype=torch.float32)]
    if len(case.parameters) == 1:
        tensors[3] = torch.full_like(tensors[3], size)
    else:
        for x, number in zip(tensors[3:], (size, 1), strict=True):
            x.zero_()[:, 0] = number
    mask = torch.zeros(tensors[1].shape[:2], dtype=torch.bool)
    assert all((x == 0).all() for x in run_with_gradients(case, tensors, key_mask=mask))
    with torch.no_grad():
        assert (case(*tensors, key_mask=mask) == 0).all()
