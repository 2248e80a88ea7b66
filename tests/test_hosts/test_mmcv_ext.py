"""The operators that replace ``mmcv._ext``, compared with formulas and the compiled operators."""

import importlib
import itertools
import re
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import mmcv
import pytest
import torch
import torch.nn.functional as F

from aft_mm.hosts import mmcv_ext

pytestmark = pytest.mark.slow

OURS = mmcv_ext.make_module('ours')
KINDS = ['random', 'none', 'one', 'equal', 'identical scores', 'negative sides', 'far away']


def boxes_and_scores(kind, number=300):
    boxes = torch.rand(number, 4) * 100
    boxes[:, 2:] = boxes[:, :2] + torch.rand(number, 2) * 60
    scores = torch.rand(number)
    if kind in ('none', 'one'):
        keep = int(kind == 'one')
        return boxes[:keep], scores[:keep]
    if kind == 'equal':
        return boxes[:1].expand(9, 4).contiguous(), scores[:9]
    if kind == 'identical scores':
        return boxes, (scores * 10).round() / 10
    if kind == 'negative sides':
        boxes[::3, 2] = boxes[::3, 0] - 5
    if kind == 'whole corners':  # IoUs that equal a threshold
        boxes = (boxes / 10).round()
    if kind == 'far away':
        boxes = boxes + 1e4
    return boxes, scores


def iou(a, b, offset=0):
    sides = [min(a[i + 2], b[i + 2]) - max(a[i], b[i]) + offset for i in (0, 1)]
    shared = max(sides[0], 0) * max(sides[1], 0)
    areas = [(x[2] - x[0] + offset) * (x[3] - x[1] + offset) for x in (a, b)]
    return shared / (sum(areas) - shared)


@pytest.fixture(scope='module')
def compiled():
    spec = PathFinder.find_spec('mmcv._ext', mmcv.__path__)
    if spec is None:
        pytest.skip('the compiled mmcv is not installed; `make compiled-mmcv` builds it')
    return importlib.import_module('mmcv._ext')


@pytest.fixture
def module(monkeypatch):
    """Return a module of ``mmcv.ops`` that calls an extension, by default ours."""

    def patch(name, extension=OURS):
        module = importlib.import_module(f'mmcv.ops.{name}')
        monkeypatch.setattr(module, 'ext_module', extension)
        return module

    return patch


@pytest.mark.parametrize('offset', [0, 1])
@pytest.mark.parametrize('kind', KINDS)
def test_nms_equals_its_definition(kind, offset):
    boxes, scores = boxes_and_scores(kind, 60)
    found: list[int] = []
    for i in scores.argsort(descending=True).tolist():
        if all(iou(boxes[i].tolist(), boxes[j].tolist(), offset) <= 0.3 for j in found):
            found.append(i)
    assert OURS.nms(boxes, scores, 0.3, offset).tolist() == found


@pytest.mark.parametrize('method', [0, 1, 2])
def test_soft_nms_equals_its_definition(method):
    boxes, scores = boxes_and_scores('random', 40)
    left = dict(enumerate(zip(boxes.tolist(), scores.tolist(), strict=True)))
    expected = []
    while left:
        best = max(left, key=lambda i: left[i][1])
        box, score = left.pop(best)
        expected.append((best, score))
        for i, (other, s) in list(left.items()):
            overlap = iou(box, other)
            decay = 1.0
            if method == 2:
                decay = float(torch.exp(torch.tensor(-(overlap**2) / 0.5)))
            elif overlap >= 0.3:
                decay = 1 - overlap if method else 0.0
            left[i] = other, s * decay
            if s * decay < 0.05:
                del left[i]
    dets = torch.full((40, 5), float('nan'))
    order = OURS.softnms(boxes, scores, dets, 0.3, 0.5, 0.05, method, 0)
    assert order.tolist() == [i for i, _ in expected]
    torch.testing.assert_close(dets[: len(order), 4], torch.tensor([s for _, s in expected]))


def test_nan_scores_and_boxes_neither_fail_nor_remove_other_boxes():
    boxes, scores = boxes_and_scores('random', 20)
    boxes[3], scores[5] = float('nan'), float('nan')
    boxes[7] = float('inf')
    found = OURS.nms(boxes, scores, 0.5, 0)
    assert 3 in found and len(found) == len(set(found.tolist())) <= 20


@pytest.mark.parametrize('kind', KINDS)
def test_nms_match_groups_what_nms_keeps(kind):
    boxes, scores = boxes_and_scores(kind, 60)
    groups = OURS.nms_match(torch.cat((boxes, scores[:, None]), 1), 0.3)
    assert sorted(itertools.chain(*groups)) == list(range(len(boxes)))
    for first, *others in groups:
        assert all(iou(boxes[first].tolist(), boxes[i].tolist()) >= 0.3 for i in others)
    kept = OURS.nms(boxes, scores, 0.3, 0)
    assert [group[0] for group in groups] == kept.tolist()


def test_nms_of_thirty_thousand_boxes():
    boxes, scores = boxes_and_scores('random', 30_000)
    boxes += torch.arange(30_000).remainder(1000)[:, None] * 200
    found = OURS.nms(boxes, scores, 0.5, 0)
    assert 1000 < len(found) < 30_000
    assert (scores[found].diff() <= 0).all()


@pytest.mark.parametrize('kind', [*KINDS, 'whole corners'])
def test_nms_equals_the_compiled_operators(compiled, kind):
    boxes, scores = boxes_and_scores(kind)
    number = len(boxes)
    for threshold in (0.0, 0.3, 0.5, 0.6):
        for offset in (0, 1):
            expected = compiled.nms(boxes, scores, iou_threshold=threshold, offset=offset)
            assert torch.equal(OURS.nms(boxes, scores, threshold, offset), expected)
            for method in (0, 1, 2):
                dets, same = torch.zeros(2, number, 5)
                options = dict(iou_threshold=threshold, offset=offset, method=method)
                options |= dict(sigma=0.5, min_score=0.05)
                order = OURS.softnms(boxes, scores, dets, **options)
                assert torch.equal(order, compiled.softnms(boxes, scores, same, **options))
                torch.testing.assert_close(dets[: len(order)], same[: len(order)])
        if number:
            rows = torch.cat((boxes, scores[:, None]), 1)
            groups = [list(group) for group in compiled.nms_match(rows, threshold)]
            assert OURS.nms_match(rows, threshold) == groups


ROIS = torch.tensor([[0, 1.0, 2, 9, 8], [1, -4, -3, 5, 30], [0, 3, 3, 5, 4], [1, 5, 5, 7, 6]])


@pytest.fixture
def roi_align(module):
    function = module('roi_align').roi_align

    def call(x, rois, scale=0.5, ratio=2, aligned=True):
        return function(x, rois, (4, 5), scale, ratio, 'avg', aligned)

    return call


@pytest.mark.parametrize('ratio', [0, 2])
@pytest.mark.parametrize('aligned', [True, False])
def test_roi_align_equals_the_compiled_operator(compiled, ratio, aligned):
    x, grad = torch.randn(2, 3, 11, 13), torch.randn(4, 3, 4, 5)
    options = dict(aligned_height=4, aligned_width=5, spatial_scale=0.5, sampling_ratio=ratio)
    options |= dict(pool_mode=1, aligned=aligned)
    results = []
    for extension in (OURS, compiled):
        output, *argmax = torch.zeros(3, 4, 3, 4, 5)
        extension.roi_align_forward(x, ROIS, output, *argmax, **options)
        grad_input = torch.zeros_like(x)
        extension.roi_align_backward(grad, ROIS, *argmax, grad_input, **options)
        results.append((output, *argmax, grad_input))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize('ratio', [0, 2])
@pytest.mark.parametrize('number', [float('nan'), float('inf'), -float('inf')])
def test_a_region_with_nan_or_infinity_pools_to_nan(roi_align, number, ratio):
    """torchvision's operator alone ends the process here."""
    x = torch.randn(2, 2, 7, 9, requires_grad=True)
    rois = ROIS.clone()
    rois[torch.arange(4), torch.arange(1, 5)] = number
    elsewhere = ROIS[:2].clone()
    elsewhere[:, 0] = torch.tensor([-1, 2])  # there are two images
    rois = torch.cat((rois, elsewhere, ROIS))
    found = roi_align(x, rois, ratio=ratio)
    assert found[:6].isnan().all()
    alone = roi_align(x, ROIS, ratio=ratio)
    assert torch.equal(found[6:], alone)
    (grad,) = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(grad, torch.autograd.grad(alone.sum(), x)[0])


@pytest.fixture
def assert_focal_loss(module):
    functions = module('focal_loss')

    def check(name, logits, loss, *arguments):
        found = getattr(functions, f'{name}_focal_loss')(logits, *arguments, 'sum')
        torch.testing.assert_close(found, loss.sum())
        (grad,) = torch.autograd.grad(found, logits)
        torch.testing.assert_close(grad, torch.autograd.grad(loss.sum(), logits)[0])

    return check


@pytest.mark.parametrize('gamma, alpha', [(2.0, 0.25), (0.5, 0.7)])
@pytest.mark.parametrize('weighted', [False, True])
def test_sigmoid_focal_loss_is_its_formula(assert_focal_loss, gamma, alpha, weighted):
    logits = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    target = torch.arange(9) % 6  # 5 is the background
    weight = torch.rand(6, dtype=torch.float64)[:5] if weighted else None
    p, hit = logits.sigmoid(), F.one_hot(target, 6)[:, :5].double()
    loss = -hit * alpha * (1 - p) ** gamma * p.log()
    loss = loss - (1 - hit) * (1 - alpha) * p**gamma * (1 - p).log()
    if weighted:
        loss = loss * torch.cat((weight, torch.ones(1)))[target][:, None]
    assert_focal_loss('sigmoid', logits, loss, target, gamma, alpha, weight)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32])
def test_sigmoid_focal_loss_of_large_logits(module, dtype):
    """1 − p is 0 from a logit of 9 in float16 on."""
    function = module('focal_loss').sigmoid_focal_loss
    logits = torch.tensor([[9.0, -18], [7, 20], [-60, 0]], dtype=dtype, requires_grad=True)
    target = torch.tensor([0, 2, 0])  # 2 is the background
    exact = logits.detach().double().requires_grad_()
    p, hit = exact.sigmoid(), F.one_hot(target, 3)[:, :2].double()
    losses = -hit * 0.25 * (1 - p) ** 2 * F.logsigmoid(exact)
    losses = losses - (1 - hit) * 0.75 * p**2 * F.logsigmoid(-exact)
    found = function(logits, target, 2.0, 0.25, None, 'none')
    tolerance = dict(rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    torch.testing.assert_close(found.double(), losses, **tolerance)
    (grad,) = torch.autograd.grad(found.sum(), logits)
    expected = torch.autograd.grad(losses.sum(), exact)[0]
    torch.testing.assert_close(grad.double(), expected, **tolerance)


@pytest.fixture
def deformable(module):
    def call(extension, x, offset, mask, weight, bias):
        plain = module('deform_conv', extension).deform_conv2d
        modulated = module('modulated_deform_conv', extension).modulated_deform_conv2d
        first = plain(x, offset, weight, 2, 1, 1, 2, 2)
        return first, modulated(x, offset, mask, weight, bias, 2, 1, 1, 2, 2)

    return call


def deformable_inputs():
    shapes = (2, 4, 6, 7), (2, 2 * 2 * 9, 3, 4), (2, 2 * 9, 3, 4), (6, 2, 3, 3), (6,)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def test_a_nan_offset_gives_nan_at_its_place_only(deformable):
    """torchvision's operator alone ends the process here."""
    x, offset, mask, weight, bias = deformable_inputs()
    lost = offset.detach().clone()
    lost[0, 1, 1, 2] = lost[1, ::2, 0, 3] = float('nan')
    lost.requires_grad_()
    expected = deformable(OURS, x, offset, mask, weight, bias)
    found = deformable(OURS, x, lost, mask, weight, bias)
    seen = torch.ones(2, 1, 3, 4, dtype=torch.bool)
    seen[0, 0, 1, 2] = seen[1, 0, 0, 3] = False
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.isnan(), ~seen.expand_as(a))
        torch.testing.assert_close(a.nan_to_num(0), b * seen)
    inputs = [x, mask, weight]
    one = torch.autograd.grad(sum(y.nansum() for y in found), [*inputs, lost])
    other = torch.autograd.grad(sum((y * seen).sum() for y in expected), [*inputs, offset])
    torch.testing.assert_close(one, other)


@pytest.mark.nightly
def test_deformable_convolutions_gradcheck(deformable):
    inputs = deformable_inputs()
    # Not at whole pixels, where bilinear interpolation has a kink.
    inputs[1] = (inputs[1].detach().frac() * 0.4 + 0.3).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *t: deformable(OURS, *t), inputs, nondet_tol=1e-9, fast_mode=True
    )


@pytest.mark.parametrize('kind', ['random', 'zero', 'whole'])
def test_deformable_convolutions_equal_the_compiled_operator(compiled, deformable, kind):
    inputs = deformable_inputs()
    offset = inputs[1].detach() * (kind != 'zero')
    inputs[1] = (offset.round() if kind == 'whole' else offset).requires_grad_()
    ours, theirs = deformable(OURS, *inputs), deformable(compiled, *inputs)
    torch.testing.assert_close(ours, theirs)
    found = torch.autograd.grad(sum(y.square().sum() for y in ours), inputs)
    inputs = [x.detach().requires_grad_() for x in inputs]
    theirs = deformable(compiled, *inputs)
    expected = torch.autograd.grad(sum(y.square().sum() for y in theirs), inputs)
    torch.testing.assert_close(found, expected)


def test_masked_convolution_is_a_convolution_at_masked_positions(module):
    layer = module('masked_conv').MaskedConv2d(3, 5, 3, padding=1)
    x, mask = torch.randn(1, 3, 7, 9), torch.rand(1, 7, 9) > 0.6
    torch.testing.assert_close(layer(x, mask), layer(x) * mask, rtol=1e-5, atol=1e-6)


def test_deformable_attention_gradcheck(module):
    attention = module('multi_scale_deform_attn')
    shapes = torch.tensor([[4, 5], [2, 3]])
    inputs = [
        torch.randn(2, 26, 3, 4, dtype=torch.float64, requires_grad=True),
        torch.rand(2, 7, 3, 2, 2, 2, dtype=torch.float64, requires_grad=True),
        torch.rand(2, 7, 3, 2, 2, dtype=torch.float64, requires_grad=True),
    ]

    def ours(value, locations, weights):
        starts, apply = torch.tensor([0, 20]), attention.MultiScaleDeformableAttnFunction.apply
        return apply(value, shapes, starts, locations, weights, 64)

    assert torch.autograd.gradcheck(ours, inputs, nondet_tol=1e-9)


def test_spatial_attention_equals_the_compiled_operator(compiled):
    x, grad = torch.randn(2, 15, 4, 6), torch.randn(2, 24, 4, 6)
    for kind in (0, 1):
        options = dict(psa_type=kind, num_=2, h_feature=4, w_feature=6)
        options |= dict(h_mask=3, w_mask=5, half_h_mask=1, half_w_mask=2)
        for name, given, result in (('forward', x, grad), ('backward', grad, x)):
            ours, theirs = torch.zeros(2, *result.shape)
            getattr(OURS, f'psamask_{name}')(given, ours, **options)
            getattr(compiled, f'psamask_{name}')(given, theirs, **options)
            assert torch.equal(ours, theirs)


def test_an_operator_without_a_replacement_raises_when_it_is_called():
    function = OURS.three_nn_forward
    with pytest.raises(NotImplementedError, match=r"^mmcv operator 'three_nn_forward' needs the"):
        function(torch.zeros(1))
    with pytest.raises(AttributeError):
        OURS.__wrapped__  # noqa: B018


# Imports each mmcv in a fork of a process that has imported torch.
IMPORT = """
import os, sys
import mmengine.model, torchvision
for lite in sys.argv[1:]:
    if process := os.fork():
        assert os.waitpid(process, 0)[1] == 0
        continue
    assert 'mmcv' not in sys.modules and os.dup2(1, 2) == 2
    sys.path.insert(0, lite)
    import aft_mm.registry
    import mmcv.ops
    from aft_mm.hosts import selected_operators
    print(selected_operators(), mmcv.__file__, flush=True)
    break
"""


def test_an_mmcv_without_working_operators_uses_ours(tmp_path):
    """A copy of mmcv without its library, or with one that cannot be loaded."""
    folders = [tmp_path / name for name in ('none', 'damaged')]
    for folder in folders:
        (folder / 'mmcv').mkdir(parents=True)
        for part in Path(mmcv.__file__).parent.iterdir():
            if not part.name.startswith('_ext.'):
                (folder / 'mmcv' / part.name).symlink_to(part)
    (folders[1] / 'mmcv' / '_ext.so').write_text('not a library')
    command = [sys.executable, '-c', IMPORT, *folders]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    none, damaged = re.split(r'^(?<=none/mmcv/__init__.py\n)', done.stdout, flags=re.M)
    for text, folder in ((none, folders[0]), (damaged, folders[1])):
        assert re.search(f'^torchvision .*{folder}', text, re.M), text
    warning = 'the compiled operators of mmcv cannot be loaded'
    assert warning in damaged and warning not in none
