"""The operators of mmcv at places where rules differ: whole pixels, borders, ties, half precision.

Expected values are sums over single samples, boxes and pixels in float64.
"""

import importlib
import itertools
import math

import numpy as np
import pytest
import torch
from mmcv.utils import collect_env

from aft_mm.hosts import mmcv_ext

from ..helpers import each

OURS = mmcv_ext.make_module('ours')
HALF = [torch.float16, torch.bfloat16]
THRESHOLDS = [round(0.05 * i, 2) for i in range(1, 20)]


@pytest.fixture
def ops(monkeypatch):
    """Return functions of ``mmcv.ops`` that call our operators."""

    def get(name, function):
        module = importlib.import_module(f'mmcv.ops.{name}')
        monkeypatch.setattr(module, 'ext_module', OURS)
        return getattr(module, function)

    return get


# Bilinear samples


def sample(image, y, x):
    """Return the value at (y, x) of an image [H, W] and its slopes in y and x, as mmcv defines them.

    Pixels outside are 0. A position that is a whole pixel or more outside has no slope. The slope at a
    whole pixel is that towards larger coordinates.
    """
    height, width = image.shape
    if not (-1 < y < height and -1 < x < width):
        return 0.0, 0.0, 0.0
    top, left = math.floor(y), math.floor(x)

    def pixel(i, j):
        return image[i, j] if 0 <= i < height and 0 <= j < width else 0.0

    (a, b), (c, d) = [[pixel(top + i, left + j) for j in (0, 1)] for i in (0, 1)]
    fy, fx = y - top, x - left
    value = (1 - fy) * ((1 - fx) * a + fx * b) + fy * ((1 - fx) * c + fx * d)
    return value, (1 - fx) * (c - a) + fx * (d - b), (1 - fy) * (b - a) + fy * (d - c)


GEOMETRIES = [  # map, kernel, stride, padding, dilation, groups of channels, groups of offsets
    ((4, 5), (3, 3), (1, 1), (1, 1), (1, 1), 1, 1),
    ((5, 4), (2, 3), (2, 1), (1, 2), (1, 2), 2, 2),
    ((3, 3), (1, 1), (1, 1), (0, 0), (1, 1), 1, 2),
    ((2, 6), (3, 1), (1, 2), (2, 1), (2, 1), 2, 1),
]
KINDS = ['zero', 'whole', 'border', 'far', 'random']


def convolution_case(kind, geometry):
    size, kernel, stride, padding, dilation, groups, deform_groups = geometry
    out = [
        (size[i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1
        for i in (0, 1)
    ]
    taps = deform_groups * math.prod(kernel)
    x = torch.randn(2, 4, *size, dtype=torch.float64)
    weight = torch.randn(6, 4 // groups, *kernel, dtype=torch.float64)
    offset = torch.randn(2, taps, 2, *out, dtype=torch.float64)
    if kind == 'zero':
        offset *= 0
    elif kind == 'whole':
        offset = (2 * offset).round()
    elif kind == 'far':
        offset *= 100
    elif kind == 'border':
        for tap, i, j in itertools.product(range(taps), range(out[0]), range(out[1])):
            row, column = divmod(tap % math.prod(kernel), kernel[1])
            base = (
                i * stride[0] - padding[0] + row * dilation[0],
                j * stride[1] - padding[1] + column * dilation[1],
            )
            for image, axis in itertools.product(range(2), range(2)):
                ends = [-1, 0, size[axis] - 1, size[axis], -0.5, size[axis] - 0.5]
                end = ends[(tap + 3 * i + 2 * j + image + 5 * axis) % 6]
                offset[image, tap, axis, i, j] = end - base[axis]
    mask = torch.rand(2, taps, *out, dtype=torch.float64)
    return x, offset.flatten(1, 2), mask, weight


def expected_convolution(x, offset, mask, weight, geometry, grad):
    """Return the output and the gradients of the offset and the mask for those of the output."""
    size, kernel, stride, padding, dilation, groups, deform_groups = geometry
    output, to_offset, to_mask = (np.zeros(t.shape) for t in (grad, offset, mask))
    x, offset, mask, weight, grad = (t.numpy() for t in (x, offset, mask, weight, grad))
    per_output, per_deform = len(weight) // groups, x.shape[1] // deform_groups
    for n, i, j in itertools.product(*(range(k) for k in (len(x), *grad.shape[2:]))):
        for c, row, column in itertools.product(range(x.shape[1]), *map(range, kernel)):
            tap = (c // per_deform * kernel[0] + row) * kernel[1] + column
            y = i * stride[0] - padding[0] + row * dilation[0] + offset[n, 2 * tap, i, j]
            z = j * stride[1] - padding[1] + column * dilation[1] + offset[n, 2 * tap + 1, i, j]
            value, slope_y, slope_z = sample(x[n, c], y, z)
            group, inner = divmod(c, weight.shape[1])
            outputs = slice(group * per_output, (group + 1) * per_output)
            factors = weight[outputs, inner, row, column]
            output[n, outputs, i, j] += factors * mask[n, tap, i, j] * value
            share = (grad[n, outputs, i, j] * factors).sum()
            to_mask[n, tap, i, j] += share * value
            to_offset[n, 2 * tap, i, j] += share * mask[n, tap, i, j] * slope_y
            to_offset[n, 2 * tap + 1, i, j] += share * mask[n, tap, i, j] * slope_z
    return [torch.from_numpy(t) for t in (output, to_offset, to_mask)]


@each('kind, geometry', list(itertools.product(KINDS, GEOMETRIES)))
def test_deformable_convolutions_equal_the_sum_over_samples(ops, kind, geometry):
    x, offset, mask, weight = convolution_case(kind, geometry)
    leaves = [t.requires_grad_() for t in (offset, mask)]
    for function in ('deform_conv2d', 'modulated_deform_conv2d'):
        if function == 'deform_conv2d':
            found = ops('deform_conv', function)(x, offset, weight, *geometry[2:])
            given = torch.ones_like(mask)
        else:
            call = ops('modulated_deform_conv', function)
            found, given = call(x, offset, mask, weight, None, *geometry[2:]), mask
        grad = torch.randn_like(found)
        detached = [t.detach() for t in (x, offset, given, weight)]
        output, *grads = expected_convolution(*detached, geometry, grad)
        torch.testing.assert_close(found, output)
        used = leaves if given is mask else leaves[:1]
        torch.testing.assert_close(
            torch.autograd.grad(found, used, grad), tuple(grads[: len(used)])
        )


def test_the_first_step_of_a_layer_gives_offsets_in_the_padding_no_gradient(ops):
    layer = ops('modulated_deform_conv', 'ModulatedDeformConv2dPack')(1, 1, 3, padding=1)
    with torch.no_grad():
        layer.weight.fill_(1)
    layer(torch.ones(1, 1, 5, 5)).sum().backward()
    rows, columns = layer.conv_offset.bias.grad[:18].view(3, 3, 2).unbind(2)
    assert not rows[0].any() and (rows[2] < 0).all()
    assert not columns[:, 0].any() and (columns[:, 2] < 0).all()


@each('larger', [(8, 8), (4, 5), (9, 4), (8, 2)])
def test_of_a_larger_offset_or_mask_the_first_numbers_are_read(ops, larger):
    call = ops('modulated_deform_conv', 'modulated_deform_conv2d')
    x, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    offset = torch.randn(2, 18, *larger, requires_grad=True)
    mask = torch.rand(2, 9, *larger, requires_grad=True)
    small = [t.flatten(1)[:, : c * 16].view(2, c, 4, 4) for t, c in ((offset, 18), (mask, 9))]
    found = call(x, offset, mask, weight, None, 2, 1)
    expected = call(x, *small, weight, None, 2, 1)
    assert torch.equal(found, expected)
    grad = torch.randn_like(found)
    one, other = (torch.autograd.grad(y, (offset, mask), grad) for y in (found, expected))
    assert all(map(torch.equal, one, other))
    assert one[0].flatten(1)[:, 18 * 16 :].count_nonzero() == 0


def test_a_smaller_offset_is_refused(ops):
    call = ops('modulated_deform_conv', 'modulated_deform_conv2d')
    x, weight = torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3)
    with pytest.raises(RuntimeError, match='offset'):
        call(x, torch.randn(1, 18, 3, 4), torch.rand(1, 9, 4, 4), weight, None, 2, 1)


@each('places', ['whole', 'border', 'random'])
def test_deformable_attention_equals_the_sum_over_samples(ops, places):
    shapes = [(3, 4), (2, 1)]
    value = torch.randn(2, 14, 2, 3, dtype=torch.float64)
    locations = torch.rand(2, 5, 2, 2, 3, 2, dtype=torch.float64) * 1.4 - 0.2
    for level, (height, width) in enumerate(shapes):
        size = torch.tensor([width, height])
        pixels = locations[:, :, :, level] * size - 0.5
        if places == 'whole':
            pixels = pixels.round()
        if places == 'border':
            picks = torch.randint(4, pixels.shape)
            ends = torch.stack([-size.new_ones(2), 0 * size, size - 1, size])
            pixels = torch.stack([ends[picks[..., k], k] for k in (0, 1)], -1).double()
        locations[:, :, :, level] = (pixels + 0.5) / size
    weights = torch.rand(2, 5, 2, 2, 3, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (locations, weights)]
    apply = ops('multi_scale_deform_attn', 'MultiScaleDeformableAttnFunction').apply
    found = apply(value, torch.tensor(shapes), torch.tensor([0, 12]), locations, weights, 64)
    grad = torch.randn_like(found)
    output, to_places, to_weights = (torch.zeros_like(t) for t in (found, locations, weights))
    for n, q, h, level, p in np.ndindex(*weights.shape):
        height, width = shapes[level]
        start = 12 * level
        x, y = (
            locations[n, q, h, level, p].detach() * torch.tensor([width, height]) - 0.5
        ).tolist()
        # Products of a size and its fractions are not whole in float64.
        x, y = (round(v) if abs(v - round(v)) < 1e-9 else v for v in (x, y))
        weight = float(weights[n, q, h, level, p].detach())
        for c in range(3):
            image = value[n, start : start + height * width, h, c].view(height, width).numpy()
            result, slope_y, slope_x = sample(image, y, x)
            channel = h * 3 + c
            share = float(grad[n, q, channel])
            output[n, q, channel] += weight * result
            to_weights[n, q, h, level, p] += share * result
            to_places[n, q, h, level, p, 0] += share * weight * slope_x * width
            to_places[n, q, h, level, p, 1] += share * weight * slope_y * height
    torch.testing.assert_close(found, output)
    got = torch.autograd.grad(found, leaves, grad)
    torch.testing.assert_close(got[1], to_weights)
    if places == 'border':  # rounding decides on which side of the border a position is
        pixels = torch.stack(
            [
                locations[:, :, :, k].detach() * torch.tensor([w, h])
                for k, (h, w) in enumerate(shapes)
            ],
            3,
        )
        outside = ((pixels - 0.5) <= -1).any(-1)
        assert outside.any() and not got[0][outside].any()
    elif places == 'random':
        torch.testing.assert_close(got[0], to_places)


# Regions


def expected_roi_align(x, roi, size, scale, ratio, aligned):
    """Return the pooled region [C, h, w] and its gradient for ones in the map, [C, H, W]."""
    _, channels, height, width = x.shape
    image, start, length, half = x[int(roi[0])], [], [], 0.5 * aligned
    for low, high in ((roi[2], roi[4]), (roi[1], roi[3])):
        start.append(float(low) * scale - half)
        side = float(high - low) * scale
        length.append(side if aligned else max(side, 1.0))
    output, slope = np.zeros((channels, *size)), np.zeros((channels, height, width))
    counts = [ratio or max(math.ceil(length[k] / size[k]), 1) for k in (0, 1)]
    for i, j in np.ndindex(*size):
        samples = []
        for a, b in np.ndindex(*counts):
            y = start[0] + (i + (a + 0.5) / counts[0]) * length[0] / size[0]
            z = start[1] + (j + (b + 0.5) / counts[1]) * length[1] / size[1]
            corners = {}
            if -1 <= y <= height and -1 <= z <= width:
                y, z = min(max(y, 0), height - 1), min(max(z, 0), width - 1)
                for r, s in np.ndindex(2, 2):
                    row, column = min(int(y) + r, height - 1), min(int(z) + s, width - 1)
                    part = (y % 1 if r else 1 - y % 1) * (z % 1 if s else 1 - z % 1)
                    corners[row, column] = corners.get((row, column), 0) + part
            samples.append(corners)
        for c in range(channels):
            values = [sum(w * image[c, *at].item() for at, w in s.items()) for s in samples]
            output[c, i, j] = sum(values) / len(values)
            for corners in samples:
                for at, w in corners.items():
                    slope[c, *at] += w / len(samples)
    return torch.from_numpy(output), torch.from_numpy(slope)


@each('aligned, ratio', list(itertools.product([True, False], [0, 2])))
def test_roi_align_equals_the_samples_at_borders(ops, aligned, ratio):
    x = torch.randn(2, 2, 5, 6, dtype=torch.float64, requires_grad=True)
    rois = [
        [0, 0, 0, 12, 10],
        [1, 2, 2, 8, 6],
        [0, -2, -2, 0, 0],
        [1, 10, 8, 14, 12],
        [0, -20, 3, -10, 5],
        [1, 3.3, 1.7, 9.1, 2.2],
    ]
    rois = torch.tensor(rois, dtype=torch.float64)
    found = ops('roi_align', 'roi_align')(x, rois, (2, 3), 0.5, ratio, 'avg', aligned)
    for roi, got in zip(rois, found, strict=True):
        output, slope = expected_roi_align(x, roi, (2, 3), 0.5, ratio, aligned)
        torch.testing.assert_close(got, output)
        (grad,) = torch.autograd.grad(got.sum(), x, retain_graph=True)
        torch.testing.assert_close(grad[int(roi[0])], slope)


def test_no_regions_give_an_empty_result_and_no_gradient(ops):
    x, rois = torch.randn(2, 3, 5, 6, requires_grad=True), torch.zeros(0, 5)
    found = ops('roi_align', 'roi_align')(x, rois, (2, 2), 1.0)
    assert found.shape == (0, 3, 2, 2)
    assert not torch.autograd.grad(found.sum(), x)[0].any()


def test_max_pooling_of_regions_needs_the_compiled_mmcv(ops):
    x, rois = torch.randn(1, 3, 5, 6), torch.zeros(1, 5)
    with pytest.raises(NotImplementedError, match="pool_mode='max' needs the compiled mmcv"):
        ops('roi_align', 'roi_align')(x, rois, (2, 2), 1.0, 0, 'max')
    with pytest.raises(NotImplementedError, match="'roi_pool_forward' needs the compiled mmcv"):
        ops('roi_pool', 'roi_pool')(x, rois, (2, 2), 1.0)


# Boxes


def crowded(number, dtype=torch.float32):
    """Boxes with small whole corners, of which many overlap by a simple fraction, and their scores."""
    corners = torch.randint(0, 8, (number, 2))
    boxes = torch.cat((corners, corners + torch.randint(1, 11, (number, 2))), 1)
    return boxes.to(dtype), (torch.randperm(number) + 1).to(dtype) / number


def overlap(a, b, offset):
    """Return the IoU in float32, as mmcv computes it."""
    sides = [min(a[k + 2], b[k + 2]) - max(a[k], b[k]) + offset for k in (0, 1)]
    areas = [math.prod(box[k + 2] - box[k] + offset for k in (0, 1)) for box in (a, b)]
    shared = math.prod(max(side, 0) for side in sides)
    return np.float32(shared) / np.float32(sum(areas) - shared)


@each('threshold, offset', list(itertools.product(THRESHOLDS, [0, 1])))
def test_boxes_of_exactly_the_threshold(ops, threshold, offset):
    """nms keeps them, nms_match and soft_nms count them as overlapping."""
    limit, equal = np.float32(threshold), 0
    for _ in range(6):
        boxes, scores = crowded(40)
        rows = boxes.tolist()
        order = scores.argsort(descending=True).tolist()
        kept, match, left = [], [], list(order)
        for i in order:
            ious = [overlap(rows[j], rows[i], offset) for j in kept]
            equal += limit in ious
            if all(iou <= limit for iou in ious):
                kept.append(i)
        found = ops('nms', 'nms')(boxes, scores, threshold, offset)
        assert found[1].tolist() == kept
        while left:
            first, *others = left
            suppressed = [i for i in others if overlap(rows[first], rows[i], offset) >= limit]
            match.append([first, *suppressed])
            left = [i for i in others if i not in suppressed]
        dets, indices = ops('nms', 'soft_nms')(
            boxes, scores, threshold, method='naive', min_score=1e-6, offset=offset
        )
        assert indices.tolist() == [group[0] for group in match]
        if not offset:
            assert [
                list(map(int, group))
                for group in ops('nms', 'nms_match')(
                    torch.cat((boxes, scores[:, None]), 1), threshold
                )
            ] == match
    assert equal or offset or threshold not in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)


@each('dtype', HALF)
def test_large_boxes_in_half_precision(ops, dtype):
    """An area of 300 px squared has no float16."""
    boxes = torch.tensor([[0, 0, 320, 320], [0, 0, 320, 256], [320, 320, 640, 640]], dtype=dtype)
    scores = torch.tensor([0.5, 0.75, 0.25], dtype=dtype)
    assert ops('nms', 'nms')(boxes, scores, 0.7)[1].tolist() == [1, 2]
    assert ops('nms', 'soft_nms')(boxes, scores, 0.7, method='naive')[1].tolist() == [1, 2]


# Half precision and sizes


def in_both(function, dtype, *tensors):
    """Return outputs and gradients in half precision, and those of the same numbers in float32."""
    results = []
    for kind in (dtype, torch.float32):
        leaves = [t.to(dtype).to(kind).requires_grad_() for t in tensors]
        output = function(*leaves)
        assert output.dtype == kind
        results.append([output, *torch.autograd.grad(output.float().sum(), leaves)])
    return results


@each('dtype', HALF)
def test_half_precision_is_float32_rounded(ops, dtype):
    attention = ops('multi_scale_deform_attn', 'MultiScaleDeformableAttnFunction')
    shapes, starts = torch.tensor([[4, 5], [2, 3]]), torch.tensor([0, 20])
    masked = ops('masked_conv', 'MaskedConv2d')(3, 4, 3, padding=1).to(dtype)
    weight, where = masked.weight.detach(), torch.rand(1, 6, 7) > 0.5
    rois = torch.tensor([[0, 0, 0, 4, 4.0], [0, 1, 1, 6, 5]])
    masked_conv2d, roi_align = ops('masked_conv', 'masked_conv2d'), ops('roi_align', 'roi_align')
    cases = [
        (
            lambda v, p, w: attention.apply(v, shapes, starts, p, w, 64),
            [torch.randn(1, 26, 2, 4), torch.rand(1, 5, 2, 2, 3, 2), torch.rand(1, 5, 2, 2, 3)],
        ),
        (
            lambda x: roi_align(x, rois.to(x.dtype), (2, 2), 1.0, 2, 'avg'),
            [torch.randn(1, 2, 6, 7)],
        ),
        (lambda x: ops('psa_mask', 'PSAMask')('collect', (3, 5))(x), [torch.randn(1, 15, 2, 3)]),
        (
            lambda *x: ops('modulated_deform_conv', 'modulated_deform_conv2d')(*x, None, 1, 1),
            [
                torch.randn(shape)
                for shape in ((1, 2, 4, 5), (1, 18, 4, 5), (1, 9, 4, 5), (3, 2, 3, 3))
            ],
        ),
    ]
    for function, tensors in cases:
        for got, expected in zip(*in_both(function, dtype, *tensors), strict=True):
            torch.testing.assert_close(got.float(), expected, rtol=2e-2, atol=5e-2)
    x = torch.randn(1, 3, 6, 7).to(dtype)
    found = masked_conv2d(x, where, weight, torch.zeros(4, dtype=dtype), 1)
    expected = torch.conv2d(x.float(), weight.float(), padding=1) * where
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


def test_the_focal_loss_of_no_rows(ops):
    x = torch.randn(0, 4, requires_grad=True)
    labels = torch.zeros(0, dtype=torch.long)
    found = ops('focal_loss', 'sigmoid_focal_loss')(x, labels, 2.0, 0.25, None, 'sum')
    assert found == 0 and torch.autograd.grad(found, x)[0].shape == (0, 4)


def test_a_masked_convolution_of_no_place_is_zero(ops):
    layer = ops('masked_conv', 'MaskedConv2d')(3, 4, 3, padding=1)
    assert not layer(torch.randn(1, 3, 5, 6), torch.zeros(1, 5, 6)).any()


@each('mask, size', [((1, 1), (3, 4)), ((7, 9), (3, 2)), ((3, 5), (1, 1)), ((3, 5), (4, 6))])
def test_a_spatial_mask_smaller_and_larger_than_the_map(ops, mask, size):
    x = torch.randn(2, math.prod(mask), *size, dtype=torch.float64, requires_grad=True)
    for kind in ('collect', 'distribute'):
        layer = ops('psa_mask', 'PSAMask')(kind, mask)
        expected = torch.zeros(2, math.prod(size), math.prod(size), dtype=torch.float64)
        for h, w, i, j in np.ndindex(*size, *mask):
            y, z = h + i - mask[0] // 2, w + j - mask[1] // 2
            if 0 <= y < size[0] and 0 <= z < size[1]:
                pair = (y * size[1] + z, h * size[1] + w)
                pair = pair if kind == 'collect' else pair[::-1]
                expected[:, pair[0], pair[1]] = x[:, i * mask[1] + j, h, w].detach()
        torch.testing.assert_close(layer(x).flatten(2), expected)
        assert torch.autograd.gradcheck(layer, x)


def test_the_environment_is_described(monkeypatch):
    monkeypatch.setattr(importlib.import_module('mmcv.ops.info'), 'ext_module', OURS)
    found = collect_env()
    assert found['MMCV Compiler'] == found['MMCV CUDA Compiler'] == 'n/a'
