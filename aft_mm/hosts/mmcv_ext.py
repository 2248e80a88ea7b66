"""The operators of ``mmcv._ext`` that mmdet and mmseg use, with the signatures of mmcv 2.1."""

import math
from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.functional import vjp

from .deformable import (
    deform_conv_backward_input,
    deform_conv_backward_parameters,
    deform_conv_forward,
    modulated_deform_conv_backward,
    modulated_deform_conv_forward,
    ms_deform_attn_backward,
    ms_deform_attn_forward,
    wide,
)


def psamask_forward(input: Tensor, output: Tensor, **options: int) -> None:
    """Point-wise spatial attention: lay the mask of each place over the whole map.

    Args:
        input: [B, h_mask · w_mask, H, W], a mask around each place.
        output: [B, H · W, H, W]; channels are targets of a place (psa_type 0), or the reverse (1).
    """
    batch, _, height, width = input.shape
    laid = input.new_zeros(batch, height * width + 1, height, width)
    laid.scatter_(1, _mask_places(options, input), input)
    laid = laid[:, :-1]
    if options['psa_type']:
        laid = laid.flatten(2).transpose(1, 2).reshape(laid.shape)
    output.copy_(laid)


def psamask_backward(grad_output: Tensor, grad_input: Tensor, **options: int) -> None:
    if options['psa_type']:
        grad_output = grad_output.flatten(2).transpose(1, 2).reshape(grad_output.shape)
    padded = F.pad(grad_output, (0, 0, 0, 0, 0, 1))
    grad_input.copy_(padded.gather(1, _mask_places(options, grad_input)))


def _mask_places(options: dict[str, int], like: Tensor) -> Tensor:
    height, width = options['h_feature'], options['w_feature']
    rows = torch.arange(options['h_mask'], device=like.device) - options['half_h_mask']
    columns = torch.arange(options['w_mask'], device=like.device) - options['half_w_mask']
    y = rows[:, None, None, None] + torch.arange(height, device=like.device)[:, None]
    x = columns[:, None, None] + torch.arange(width, device=like.device)
    outside = (y < 0) | (y >= height) | (x < 0) | (x >= width)
    places = (y * width + x).masked_fill(outside, height * width)
    return places.flatten(0, 1).expand(like.shape[0], -1, -1, -1)


# Boxes


def _overlaps(boxes: Tensor, others: Tensor, offset: int) -> Tensor:
    """IoU of corners [..., 4] and [N, 4] in px.

    Sides are ``x2 − x1 + offset``. Areas of half precision would overflow at 256 px.
    """
    boxes, others = wide(boxes), wide(others)
    low = torch.maximum(boxes[..., :2], others[:, :2])
    high = torch.minimum(boxes[..., 2:], others[:, 2:])
    overlap = (high - low + offset).clamp(min=0).prod(-1)
    area, other = ((b[..., 2:] - b[..., :2] + offset).prod(-1) for b in (boxes, others))
    return overlap / (area + other - overlap)


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """Indices of the boxes [N, 4] that non-maximum suppression keeps, best first."""
    # Makes sides x2 − x1 + offset.
    boxes = wide(boxes) + boxes.new_tensor([0, 0, offset, offset])
    # mmcv's sort is not stable, so that ties end equally.
    order = scores.sort(descending=True)[1]
    ranks = torch.arange(len(order), 0, -1, device=boxes.device, dtype=boxes.dtype)
    # torchvision compares with the threshold in float64: an equal IoU would be above 0.3.
    threshold = torch.tensor(iou_threshold, dtype=boxes.dtype).item()
    return order[torch.ops.torchvision.nms(boxes[order], ranks, threshold)]


def softnms(
    boxes: Tensor,
    scores: Tensor,
    dets: Tensor,
    iou_threshold: float,
    sigma: float,
    min_score: float,
    method: int,
    offset: int,
) -> Tensor:
    """Soft-NMS: decay the scores of overlapping boxes instead of dropping them.

    method: 0 drops boxes above the threshold, 1 multiplies scores by ``1 − IoU``, 2 all by
    ``exp(−IoU² / sigma)``.

    Returns:
        Indices of the rows of `dets` [N, 5], boxes with their scores, in `boxes`.
    """
    left = wide(torch.cat((boxes, scores[:, None]), 1))
    indices = torch.arange(len(boxes))
    order: list[int] = []
    while len(left):
        best = int(left[:, 4].argmax())
        dets[len(order)] = left[best]
        order.append(int(indices[best]))
        # mmcv moves the first remaining box to the place of the chosen one.
        left[best], indices[best] = left[0].clone(), indices[0].clone()
        chosen, left, indices = dets[len(order) - 1], left[1:], indices[1:]
        overlap = _overlaps(chosen[:4], left[:, :4], offset)
        if method == 2:
            decay = torch.exp(-(overlap**2) / sigma)
        else:
            decay = torch.where(overlap >= iou_threshold, 1 - overlap if method else 0.0, 1.0)
        left[:, 4] *= decay
        # As mmcv, which decides between equal scores.
        kept = left[:, 4] >= min_score
        number = int(kept.sum())
        holes = (~kept[:number]).nonzero()[:, 0]
        fillers = number + kept[number:].nonzero()[:, 0].flip(0)
        left[holes], indices[holes] = left[fillers], indices[fillers]
        left, indices = left[:number], indices[:number]
    return torch.tensor(order, dtype=torch.long)


def nms_match(dets: Tensor, iou_threshold: float) -> list[list[int]]:
    """Group boxes with scores [N, 5]: each box that NMS keeps, followed by those it suppresses."""
    order = dets[:, 4].sort(descending=True)[1]
    groups = []
    while len(order):
        first, order = order[0], order[1:]
        matched = _overlaps(dets[first, :4], dets[order, :4], 0) >= iou_threshold
        groups.append([int(first), *order[matched].tolist()])
        order = order[~matched]
    return groups


# Regions of interest


def roi_align_forward(
    input: Tensor,
    rois: Tensor,
    output: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    *,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """RoIAlign of maps [B, C, H, W] at rois [K, 5], the mean of the samples."""
    _check_average(pool_mode)
    rois, lost = _usable(rois, len(input))
    size = aligned_height, aligned_width
    pooled = torch.ops.torchvision.roi_align(
        wide(input), wide(rois), spatial_scale, *size, sampling_ratio, aligned
    )
    shift = torch.zeros_like(lost, dtype=pooled.dtype).masked_fill_(lost, math.nan)
    torch.add(pooled, shift, out=output)  # one pass


def _check_average(pool_mode: int) -> None:
    if pool_mode != 1:
        raise _needs_compiled("RoIAlign with pool_mode='max'")


def _usable(rois: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Move rois [K, 5] with NaN, infinity or no image off the map, and mark them [K, 1, 1, 1]."""
    lost = rois.isfinite().all(1).logical_not() | (rois[:, 0] < 0) | (rois[:, 0] >= batch)
    rois = rois.masked_fill(lost[:, None], -1e4)
    rois[:, 0].masked_fill_(lost, 0)
    return rois, lost[:, None, None, None]


def roi_align_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    grad_input: Tensor,
    *,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    _check_average(pool_mode)
    rois, _ = _usable(rois, len(grad_input))
    grad_input += torch.ops.torchvision._roi_align_backward(
        wide(grad_output),
        wide(rois),
        spatial_scale,
        aligned_height,
        aligned_width,
        *grad_input.shape,
        sampling_ratio,
        aligned,
    )


# Focal losses


def _sigmoid_focal_loss(
    input: Tensor, target: Tensor, weight: Tensor, gamma: float, alpha: float
) -> Tensor:
    """``−α (1 − p)^γ log p`` of the class of a row, ``−(1 − α) p^γ log(1 − p)`` of the others."""
    input, weight = wide(input), wide(weight)
    p = input.sigmoid()
    positive = target[:, None] == torch.arange(input.shape[1], device=input.device)
    loss = torch.where(
        positive,
        -alpha * (1 - p) ** gamma * F.logsigmoid(input),
        -(1 - alpha) * p**gamma * F.logsigmoid(-input),
    )
    if weight.numel():
        # The background has no weight of its own.
        known = target < len(weight)
        factor = torch.where(known, weight[target.clamp(max=len(weight) - 1)], 1)
        loss = loss * factor[:, None]
    return loss


def sigmoid_focal_loss_forward(
    input: Tensor, target: Tensor, weight: Tensor, output: Tensor, *, gamma: float, alpha: float
) -> None:
    """Focal loss of logits [N, C] and classes [N] (C: background); weight [C] or empty."""
    output.copy_(_sigmoid_focal_loss(input, target, weight, gamma, alpha))


def sigmoid_focal_loss_backward(
    input: Tensor, target: Tensor, weight: Tensor, grad_input: Tensor, *, gamma: float, alpha: float
) -> None:
    def loss(x: Tensor) -> Tensor:
        return _sigmoid_focal_loss(x, target, weight, gamma, alpha)

    grad_input.copy_(vjp(loss, input, torch.ones_like(input))[1])


# Masked convolution


def masked_im2col_forward(
    features: Tensor,
    mask_h_idx: Tensor,
    mask_w_idx: Tensor,
    data_col: Tensor,
    *,
    kernel_h: int,
    kernel_w: int,
    pad_h: int,
    pad_w: int,
) -> None:
    """Write the patches of features [1, C, H, W] at the given places into [C · kH · kW, P]."""
    patches = F.unfold(features, (kernel_h, kernel_w), padding=(pad_h, pad_w))[0]
    width = features.shape[3] + 2 * pad_w - kernel_w + 1
    data_col.copy_(patches[:, mask_h_idx * width + mask_w_idx])


def masked_col2im_forward(
    masked_output: Tensor,
    mask_h_idx: Tensor,
    mask_w_idx: Tensor,
    output: Tensor,
    *,
    height: int,
    width: int,
    channels: int,
) -> None:
    """Write columns [C, P] to their places in output [1, C, H, W]."""
    output[0, :, mask_h_idx, mask_w_idx] = masked_output


#: Every operator that the replacement implements.
SUPPORTED: dict[str, Callable] = {
    function.__name__: function
    for function in (
        nms,
        softnms,
        nms_match,
        roi_align_forward,
        roi_align_backward,
        sigmoid_focal_loss_forward,
        sigmoid_focal_loss_backward,
        deform_conv_forward,
        deform_conv_backward_input,
        deform_conv_backward_parameters,
        modulated_deform_conv_forward,
        modulated_deform_conv_backward,
        masked_im2col_forward,
        masked_col2im_forward,
        ms_deform_attn_forward,
        ms_deform_attn_backward,
        psamask_forward,
        psamask_backward,
    )
}


def _needs_compiled(what: str) -> NotImplementedError:
    return NotImplementedError(
        f'{what} needs the compiled mmcv: pip install mmcv==2.1.0 '
        'builds it (a C++ compiler and some minutes are needed)'
    )


def make_module(name: str) -> ModuleType:
    def missing(operator: str) -> Callable:
        if operator.startswith('__'):
            raise AttributeError(operator)

        def call(*args: object, **kwargs: object) -> None:
            raise _needs_compiled(f'mmcv operator {operator!r}')

        return call

    module = ModuleType(name, 'Operators of mmcv by torch and torchvision.')
    module.__dict__.update(SUPPORTED, SUPPORTED=tuple(SUPPORTED), __getattr__=missing)
    # mmcv's description of the environment asks for these.
    for version in ('get_compiler_version', 'get_compiling_cuda_version'):
        setattr(module, version, lambda: 'n/a')
    return module
